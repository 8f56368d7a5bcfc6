"""Every family's files as data: their configs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from parallel_runtime.networks.diffusers.spec import ModelSpec
from tests import tiny_flux, tiny_flux2, tiny_hunyuan_dit, tiny_pixart, tiny_sd3, tiny_sdxl, tiny_wan
from tests.tiny_model import find_by_name


@dataclass(frozen=True)
class FamilyFiles:
    """One family.

    Args:
        spec: as tests call the family.
        configs: by what is special about them.
    """

    spec: str
    configs: dict[str, dict[str, Any]] = field(hash=False)

    @property
    def model(self) -> ModelSpec:
        """The family's data."""
        return find_by_name(self.spec)


_FLUX = tiny_flux.tiny_config
_SMALL = {"num_attention_heads": 2, "num_layers": 1, "num_single_layers": 1}
_WAN = tiny_wan.tiny_config
_PIXART = tiny_pixart.tiny_config
_HUNYUAN = tiny_hunyuan_dit.tiny_config

FILES = {
    "FLUX.1": FamilyFiles(
        "flux",
        {
            "small": _FLUX(**_SMALL),
            "dev": _FLUX(),
            "schnell": _FLUX(guidance_embeds=False),
            "fill": _FLUX(in_channels=384),
            "three heads": _FLUX(num_attention_heads=3, num_layers=3, num_single_layers=1),
            "other texts": _FLUX(joint_attention_dim=96, pooled_projection_dim=48),
        },
    ),
    "FLUX.2": FamilyFiles(
        "flux2",
        {
            "dev": tiny_flux2.tiny_config(),
            "klein": tiny_flux2.tiny_config(guidance_embeds=False, num_layers=2, num_single_layers=1),
        },
    ),
    "SD3": FamilyFiles(
        "sd3",
        {
            "sd3": tiny_sd3.tiny_config(qk_norm=None, dual_attention_layers=()),
            "sd3.5 large": tiny_sd3.tiny_config(dual_attention_layers=()),
            "sd3.5 medium": tiny_sd3.tiny_config(layers=3),
        },
    ),
    "SDXL": FamilyFiles("sdxl", {**tiny_sdxl.KINDS, "as ComfyUI recognises it": tiny_sdxl.recognised_config()}),
    "PixArt": FamilyFiles(
        "pixart",
        {
            "sigma": _PIXART(num_layers=1),
            "two layers": _PIXART(),
            "alpha": _PIXART(use_additional_conditions=True),
            "alpha, one layer": _PIXART(use_additional_conditions=True, num_layers=1),
            "three layers": _PIXART(num_layers=3),
            "16 channels": _PIXART(in_channels=16, out_channels=32),
        },
    ),
    "HunyuanDiT": FamilyFiles(
        "hunyuan_dit",
        {
            "1.2": _HUNYUAN(),
            "1.1": _HUNYUAN(use_style_cond_and_image_meta_size=True),
            "six layers": _HUNYUAN(num_layers=6, mlp_ratio=4.3637),
            "three heads": _HUNYUAN(num_attention_heads=3, attention_head_dim=88, num_layers=2),
        },
    ),
    "Wan": FamilyFiles(
        "wan",
        {
            "three heads": _WAN(num_attention_heads=3, num_layers=1, ffn_dim=512),
            "one head": _WAN(num_attention_heads=1, num_layers=1, ffn_dim=128),
            "text to video": _WAN(),
            "image to video": tiny_wan.image_config(),
            "first and last image": tiny_wan.image_config(pos_embed_seq_len=514),
            "Wan 2.2 5B": _WAN(in_channels=48, out_channels=48, num_layers=1),
            "Wan 2.2 image to video": _WAN(in_channels=36, num_layers=1),
        },
    ),
}
