"""Every family's calls that are refused, as data: what is changed, and what the refusal names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import ones as _ones

from parallel_runtime.networks.diffusers.spec import ModelSpec
from tests import tiny_flux, tiny_flux2, tiny_hunyuan_dit, tiny_pixart, tiny_sd3, tiny_sdxl, tiny_wan
from tests.family_calls import Call, flux2_call, flux_call, sd3_call, wan_call
from tests.tiny_model import find_by_name

Change = tuple[Call, str]
"""Arguments that are others, and what is named."""


@dataclass(frozen=True)
class Refused:
    """One family.

    Args:
        spec: its name in the registry.
        config: of its transformer.
        call: one that is taken.
        changes: what is refused when the arguments are made.
        widths: what only another model takes, refused from shapes alone.
    """

    spec: str
    config: dict[str, Any] = field(hash=False)
    call: Call = field(hash=False)
    changes: tuple[Change, ...]
    widths: tuple[Change, ...]

    @property
    def model(self) -> ModelSpec:
        """The family's data."""
        return find_by_name(self.spec)


_sdxl, _pixart, _hunyuan = tiny_sdxl.make_call, tiny_pixart.make_call, tiny_hunyuan_dit.make_call
_CLIP = {"clip_fea": _ones(1, 257, 1280)}

REFUSED = {
    "FLUX.1": Refused(
        "flux",
        tiny_flux.tiny_config(),
        flux_call(0, (8, 8), y=None, guidance=None),
        (
            ({"x": _ones(1, 16, 1, 8, 8)}, "(1, 16, 1, 8, 8)"),
            ({"context": _ones(3, 3, 64)}, "(3, 3, 64)"),
            ({"control": {}}, "control"),
            ({"guidance": _ones(3)}, "guidance"),
            ({"ref_latents": [_ones(1, 4, 8, 8)]}, "(1, 4, 8, 8)"),
        ),
        (({"x": _ones(1, 4, 8, 8)}, ""), ({"context": _ones(1, 3, 32)}, ""), ({"y": _ones(1, 8)}, "")),
    ),
    "FLUX.2": Refused(
        "flux2",
        tiny_flux2.tiny_config(),
        flux2_call(0, (4, 4)),
        (
            ({"x": _ones(1, 128, 1, 8, 8)}, "(1, 128, 1, 8, 8)"),
            ({"context": _ones(3, 5, 64)}, "(3, 5, 64)"),
            ({"guidance": _ones(3)}, "guidance"),
            ({"attention_mask": _ones(3)}, "attention_mask"),
            ({"ref_latents": [_ones(1, 16, 4, 4)]}, "(1, 16, 4, 4)"),
        ),
        (({"x": _ones(1, 16, 4, 4)}, "width"), ({"context": _ones(1, 5, 32)}, "width")),
    ),
    "SD3": Refused(
        "sd3",
        tiny_sd3.tiny_config(),
        sd3_call(0, (8, 8)),
        (
            ({"x": _ones(1, 16, 1, 8, 8)}, "(1, 16, 1, 8, 8)"),
            ({"x": _ones(1, 4, 8, 8)}, "4 channels"),
            ({"x": _ones(1, 16, 8, 26)}, "8 x 26"),
            ({"context": _ones(3, 5, 64)}, "(3, 5, 64)"),
            ({"timestep": _ones(3)}, "timestep"),
            ({"y": None}, "pooled text"),
            ({"y": _ones(2, 2, 32)}, "(2, 2, 32)"),
            ({"control": {}}, "control"),
        ),
        (({"context": _ones(1, 5, 32)}, "width"), ({"y": _ones(1, 40)}, "width")),
    ),
    "SDXL": Refused(
        "sdxl",
        tiny_sdxl.tiny_config(),
        _sdxl(1, (8, 8)),
        (
            ({"x": _ones(1, 16, 8, 8)}, "16"),
            ({"x": _ones(1, 4, 1, 8, 8)}, "(1, 4, 1, 8, 8)"),
            ({"context": _ones(3, 5, 48)}, "(3, 5, 48)"),
            ({"y": _ones(1, 1280)}, "1280"),
            ({"y": _ones(3, 96)}, "(3, 96)"),
            ({"y": None}, "got none"),
            ({"control": {}}, "control"),
        ),
        (({"context": _ones(1, 5, 64)}, "48"),),
    ),
    "PixArt": Refused(
        "pixart",
        tiny_pixart.tiny_config(num_layers=1, use_additional_conditions=True),
        _pixart(1, (8, 8)),
        (
            ({"x": _ones(1, 4, 7, 8)}, "7 x 8"),
            ({"x": _ones(1, 16, 8, 8)}, "(1, 16, 8, 8)"),
            ({"x": _ones(1, 4, 1, 8, 8)}, "(1, 4, 1, 8, 8)"),
            ({"context": _ones(3, 5, 48)}, "(3, 5, 48)"),
            ({"control": {}}, "control"),
            ({"c_size": _ones(3, 2)}, "c_size"),
        ),
        ((_pixart(1, (8, 8), width=64, micro=True), "48"),),
    ),
    "HunyuanDiT": Refused(
        "hunyuan_dit",
        tiny_hunyuan_dit.tiny_config(use_style_cond_and_image_meta_size=True),
        _hunyuan(1, (8, 8), sizes=True),
        (
            ({"x": _ones(1, 16, 8, 8)}, "(1, 16, 8, 8)"),
            ({"x": _ones(1, 4, 1, 8, 8)}, "(1, 4, 1, 8, 8)"),
            ({"context": _ones(3, 5, 24)}, "(3, 5, 24)"),
            ({"control": {}}, "control"),
            ({"text_embedding_mask": None}, "masks"),
            ({"text_embedding_mask_t5": _ones(1, 6)}, "(1, 6)"),
            ({"encoder_hidden_states_t5": None}, "two encoders"),
            ({"context": _ones(1, 4, 24), "text_embedding_mask": _ones(1, 4)}, "of 5 tokens"),
            ({"image_meta_size": _ones(1, 4)}, "image_meta_size"),
            ({"image_meta_size": None}, "image_meta_size"),
        ),
        (
            (_hunyuan(1, (8, 8), widths=(32, 32), sizes=True), ""),
            (_hunyuan(1, (8, 8), widths=(24, 24), sizes=True), ""),
        ),
    ),
    "Wan": Refused(
        "wan",
        tiny_wan.tiny_config(),
        wan_call(0, (1, 8, 8)),
        (
            ({"x": _ones(1, 16, 8, 8)}, "(1, 16, 8, 8)"),
            ({"x": _ones(2, 16, 1, 8, 8), "context": _ones(3, 3, 4096)}, "(3, 3, 4096)"),
            ({"x": _ones(1, 4, 1, 8, 8)}, "16 latent channels"),
            ({"x": _ones(1, 16, 1025, 2, 2)}, "1025"),
            ({"time_dim_concat": _ones(1)}, "time_dim_concat"),
            ({"timestep": _ones(1, 3)}, "timestep"),
        ),
        (),
    ),
    "Wan from a picture": Refused(
        "wan",
        tiny_wan.image_config(),
        {**wan_call(0, (1, 8, 8), channels=36, text=512), **_CLIP},
        (({"clip_fea": None}, "CLIP vision"), ({"context": _ones(1, 77, 4096)}, "512 tokens")),
        (({"context": _ones(1, 512, 64)}, ""), ({"clip_fea": _ones(1, 257, 1024)}, "")),
    ),
    "Wan between two pictures": Refused(
        "wan",
        tiny_wan.image_config(pos_embed_seq_len=514),
        {**wan_call(0, (1, 8, 8), channels=36, text=512), "clip_fea": _ones(1, 514, 1280)},
        (({"clip_fea": _ones(1, 257, 1280)}, "an end image"),),
        (),
    ),
}
