"""Every family as tiny models with calls of ComfyUI's: what the tests of all families go through.

A new family is one entry of `FAMILIES`, and one of `STAGED` where it has stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from parallel_runtime.networks.diffusers.spec import ModelSpec
from parallel_runtime.networks.facts import describe
from parallel_runtime.requests.facts import ModelFacts
from tests import tiny_flux, tiny_flux2, tiny_hunyuan_dit, tiny_pixart, tiny_sd3, tiny_wan
from tests.tiny_model import find_by_name, make_state_dict

Call = dict[str, torch.Tensor]
"""x, timestep, context and extras."""


@dataclass(frozen=True)
class Family:
    """A tiny model and calls of it.

    Args:
        spec: the family's name in the registry.
        config: arguments of its transformer.
        calls: of unlike sizes, some of which no number of ranks divides.
        too_small: one of a single token, which two ranks cannot share.
    """

    spec: str
    config: dict[str, Any]
    calls: tuple[Call, ...] = field(hash=False)
    too_small: Call | None = field(default=None, hash=False)

    @property
    def call(self) -> Call:
        """The first."""
        return self.calls[0]

    @property
    def model(self) -> ModelSpec:
        """The family's data."""
        return find_by_name(self.spec)


def build(family: Family) -> Any:
    """The transformer as it is after loading, the same in every process."""
    import diffusers

    transformer = getattr(diffusers, family.model.transformer_class)(**family.config)
    transformer.load_state_dict(make_state_dict(family.model, family.config))
    if family.model.prepare is not None:
        family.model.prepare(transformer)
    return transformer.requires_grad_(False).eval()


def facts_of(transformer: Any, spec: ModelSpec) -> ModelFacts:
    """Of a transformer of diffusers, in float32."""
    return describe(transformer, spec.network, spec.title, 4, (spec.token, spec.token))


@torch.no_grad()
def run(transformer: Any, family: Family, call: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """One call as the pool makes it."""
    spec = family.model
    arguments = spec.to_transformer(**call, config=transformer.config)
    return spec.from_transformer(transformer(**arguments, return_dict=False)[0], call["x"])


def _call(x: tuple[int, ...], text: tuple[int, int], scale: float = 1.0, **more: tuple[int, ...] | float) -> Call:
    """Noise of these shapes; a number is a value for each picture. `scale` is the timestep's."""
    generator = torch.Generator().manual_seed(sum(x) + sum(text))
    shapes = {"x": x, "context": (x[0], *text), **more}
    call = {
        name: torch.randn(*shape, generator=generator) if isinstance(shape, tuple) else torch.full((x[0],), shape)
        for name, shape in shapes.items()
    }
    return {**call, "timestep": scale * torch.tensor([0.9046, 0.03125])[: x[0]]}


def _latents(*sizes: tuple[int, int, int, int], **more: Any) -> tuple[Call, ...]:
    """Calls for (pictures, height, width, text tokens), of 16 channels and texts 64 wide."""
    pooled = {"y": 32} if more.pop("pooled", False) else {}
    return tuple(
        _call((batch, 16, height, width), (text, 64), **{name: (batch, wide) for name, wide in pooled.items()}, **more)
        for batch, height, width, text in sizes
    )


def _videos(*calls: tuple[tuple[int, ...], int]) -> tuple[Call, ...]:
    """Calls for ((videos, channels, frames, height, width), text tokens)."""
    return tuple(_call(x, (text, 48), 1000) for x, text in calls)


_SIX_HEADS = {"num_attention_heads": 6, "attention_head_dim": 32}
_TWO_HEADS = {"num_attention_heads": 2, "attention_head_dim": 32}
_FLUX2 = {"axes_dims_rope": (8, 8, 8, 8), "in_channels": 16, "out_channels": 16}
_WAN = {"attention_head_dim": 32, "text_dim": 48, "freq_dim": 32}
_WAN_IMAGE = {"image_dim": 24, "added_kv_proj_dim": 128, "in_channels": 20}

FAMILIES: dict[str, Family] = {
    "FLUX.1": Family(
        "flux",
        tiny_flux.tiny_config(**_SIX_HEADS, num_layers=1, num_single_layers=1, axes_dims_rope=(8, 12, 12)),
        _latents((1, 8, 12, 12), (2, 9, 13, 7), (1, 2, 4, 3), pooled=True, guidance=3.5),
    ),
    "FLUX.2": Family(
        "flux2",
        tiny_flux2.tiny_config(**_SIX_HEADS, **_FLUX2),
        _latents((1, 8, 12, 12), (2, 10, 14, 7), (1, 4, 4, 13), guidance=3.5),
    ),
    "SD3.5 medium": Family(
        "sd3",
        tiny_sd3.tiny_config(layers=2, caption_projection_dim=192, **_SIX_HEADS),
        _latents((1, 8, 12, 12), (2, 10, 14, 7), (1, 4, 4, 13), pooled=True, scale=1000),
        *_latents((1, 2, 2, 8), pooled=True, scale=1000),
    ),
    "Wan": Family(
        "wan",
        tiny_wan.tiny_config(num_attention_heads=4, ffn_dim=256, **_WAN),
        _videos(
            ((1, 16, 2, 6, 4), 6),  # 12 tokens, which 2, 3 and 4 divide
            ((2, 16, 3, 5, 7), 5),  # 36 tokens of odd sides
            ((2, 16, 1, 10, 10), 3),  # 25, which none of them divides
            ((2, 16, 1, 2, 4), 4),  # 2: on more ranks some would have no token
            ((1, 16, 1, 2, 2), 1),
        ),
    ),
    "Wan from a picture": Family(
        "wan",
        tiny_wan.tiny_config(num_attention_heads=4, ffn_dim=256, **_WAN, **_WAN_IMAGE),
        (_call((2, 20, 3, 5, 7), (512, 48), 1000, clip_fea=(2, 257, 24)),),
    ),
    "PixArt-α": Family(
        "pixart",
        tiny_pixart.tiny_config(use_additional_conditions=True),
        (
            tiny_pixart.make_call(1, (6, 8), 2),  # 12 tokens
            tiny_pixart.make_call(2, (10, 14), micro=True),  # 35
            tiny_pixart.make_call(3, (2, 2)),  # one: there is nothing to split
        ),
    ),
    "PixArt-Σ": Family(
        "pixart",
        tiny_pixart.tiny_config(num_attention_heads=3),
        (tiny_pixart.make_call(1, (6, 8), 2), tiny_pixart.make_call(2, (10, 14), micro=True)),
    ),
    "HunyuanDiT 1.1": Family(
        "hunyuan_dit",
        tiny_hunyuan_dit.tiny_config(use_style_cond_and_image_meta_size=True),
        (
            tiny_hunyuan_dit.make_call(1, (6, 8), 2, sizes=True),
            tiny_hunyuan_dit.make_call(2, (9, 14), sizes=True),  # 35
            tiny_hunyuan_dit.make_call(3, (7, 6), sizes=True),  # 12
        ),
    ),
    "HunyuanDiT 1.2": Family(
        "hunyuan_dit",
        tiny_hunyuan_dit.tiny_config(num_layers=6),
        (
            tiny_hunyuan_dit.make_call(1, (6, 8), 2),
            tiny_hunyuan_dit.make_call(2, (9, 14), sizes=True),
            tiny_hunyuan_dit.make_call(3, (7, 6), sizes=True),
        ),
        # Its rotary embedding has been split when the tokens are counted.
        tiny_hunyuan_dit.make_call(1, (2, 2)),
    ),
}
"""Those whose tokens are shared out over ranks. SDXL's never are: test_sdxl_forward.py."""


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


STAGED: dict[str, Family] = {
    "PixArt": Family("pixart", tiny_pixart.tiny_config(num_layers=4), (tiny_pixart.make_call(1, (14, 8), 2),)),
    "HunyuanDiT": Family(
        "hunyuan_dit",
        tiny_hunyuan_dit.tiny_config(num_layers=8, use_style_cond_and_image_meta_size=True),
        (tiny_hunyuan_dit.make_call(1, (12, 8), sizes=True),),
    ),
    "SD3.5 medium": Family(
        "sd3",
        tiny_sd3.tiny_config(layers=4, dual_attention_layers=(0, 1, 2), **_TWO_HEADS, caption_projection_dim=64),
        ({"x": _noise(1, 16, 14, 8), "context": _noise(1, 7, 64), "y": _noise(1, 32)},),
    ),
    "FLUX.2": Family(
        "flux2",
        tiny_flux2.tiny_config(num_layers=2, num_single_layers=4, **_TWO_HEADS, **_FLUX2),
        ({"x": _noise(1, 16, 7, 5), "context": _noise(1, 6, 64), "guidance": torch.tensor([3.5])},),
    ),
    "Wan": Family(
        "wan",
        tiny_wan.tiny_config(num_layers=4, num_attention_heads=2, ffn_dim=128, **_WAN),
        ({"x": _noise(1, 16, 3, 6, 4), "context": _noise(1, 9, 48)},),
    ),
}
"""Those with stages, with blocks for four of them, and a call of three patches. FLUX.1's have tests of their own."""
