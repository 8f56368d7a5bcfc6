"""Every family's files as data: configs, and what relatives are called."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from parallel_runtime.networks.diffusers.registry import find_by_name
from parallel_runtime.networks.diffusers.spec import ModelSpec, TensorInfo
from tests import tiny_flux, tiny_flux2, tiny_hunyuan_dit, tiny_pixart, tiny_sd3, tiny_sdxl, tiny_wan
from tests.tiny_model import to_original

Relative = tuple[str | None, str | None, str]
"""Keys that it lacks by their beginning, a key that it has besides, and what a refusal names."""


@dataclass(frozen=True)
class FamilyFiles:
    """One family.

    Args:
        spec: its name in the registry.
        configs: by what is special about them; the first is that of the relatives.
        relatives: files in the same key style.
    """

    spec: str
    configs: dict[str, dict[str, Any]] = field(hash=False)
    relatives: tuple[Relative, ...] = ()

    @property
    def model(self) -> ModelSpec:
        """The family's data."""
        return find_by_name(self.spec)

    @property
    def config(self) -> dict[str, Any]:
        """The first."""
        return next(iter(self.configs.values()))


def header(files: FamilyFiles, config: dict[str, Any], original: bool) -> dict[str, TensorInfo]:
    """Of a file with its authors' names, or with diffusers'."""
    import diffusers

    with torch.device("meta"):
        tensors = getattr(diffusers, files.model.transformer_class)(**config).state_dict()
    tensors = to_original(files.model, tensors, config) if original else tensors
    return {key: TensorInfo(tuple(tensor.shape), "F32") for key, tensor in tensors.items()}


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
        (
            ("blocks.0.mlp.", "blocks.0.mlp.inverted_conv.conv.weight", "a Sana"),
            (None, "blocks.0.attn.sr.weight", "not PixArt-α or PixArt-Σ"),
            (None, "blocks.0.attn.q_norm.weight", "not PixArt-α or PixArt-Σ"),
            (None, "controlnet_blocks.0.weight", "a ControlNet"),
            (None, "temporal_transformer_blocks.0.attn1.to_q.weight", "a Latte"),
            ("final_layer.", None, "not PixArt-α or PixArt-Σ"),
        ),
    ),
    "HunyuanDiT": FamilyFiles(
        "hunyuan_dit",
        {
            "1.2": _HUNYUAN(),
            "1.1": _HUNYUAN(use_style_cond_and_image_meta_size=True),
            "six layers": _HUNYUAN(num_layers=6, mlp_ratio=4.3637),
            "three heads": _HUNYUAN(num_attention_heads=3, attention_head_dim=88, num_layers=2),
        },
        (
            (None, "controlnet_blocks.0.weight", "a ControlNet"),
            (None, "after_proj_list.0.weight", "not HunyuanDiT"),
            ("blocks.3.", None, "not HunyuanDiT"),
            ("text_embedding_padding", None, "not HunyuanDiT"),
            ("extra_embedder.0.weight", "extra_embedder.0.weight", "not HunyuanDiT"),
        ),
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
        (
            (None, "vace_patch_embedding.weight", "VACE"),
            (None, "control_adapter.conv.weight", "camera"),
            (None, "casual_audio_encoder.encoder.final_linear.weight", "speech"),
            (None, "audio_proj.audio_proj_glob_1.layer.bias", "HuMo"),
            (None, "face_adapter.fuser_blocks.0.k_norm.weight", "Animate"),
            (None, "patch_embedding_mask.weight", "SCAIL"),
            (None, "patch_embedding_pose.weight", "SCAIL"),
            (None, "patch_embedding_global.weight", "WanDancer"),
            (None, "ref_conv.weight", "reference"),
            (None, "blocks.0.audio_cross_attn.q_linear.weight", "additions"),
            (None, "blocks.1.cross_attn.processor.k_proj.weight", "additions"),
        ),
    ),
}
