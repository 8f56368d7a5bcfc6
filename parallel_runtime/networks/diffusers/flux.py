"""FLUX.1 (dev, schnell, Kontext, Fill, Canny, Depth) and FLUX.2 (dev, klein): diffusers' classes as data, which take
latents and references as tokens with position ids. Sources: Black Forest Labs' flux and flux2, FLUX.1 Kontext."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from ...errors import RequestError
from ..tables.blocks import Blocks
from .spec import TEXT_AND_IMAGE, Call, ModelSpec, pad_sides, tokens_along

_USUAL_GUIDANCE = 3.5


@dataclass(frozen=True, kw_only=True)
class TokenSpec(ModelSpec):
    """A family that takes a latent (B, C, H, W) as tokens, each a patch x patch square, sigma as the flow time in
    [0, 1], and reference images, `ref_latents`, a list of (1 or B, C, h, w): each has an index of its own."""

    axes: int  # position ids of a token; the first three are index, row and column, the others are 0 in a picture
    index_step: int  # between the indices of the latent and of reference images

    def of_latent(self, call: Call) -> dict[str, Any]:
        """Latent and references as tokens (B, tokens, width); their places and the text's, float32 (tokens, axes)."""
        call.check(self.extras)
        x, pictures = call.x, [call.x]
        for reference in call.extras.get("ref_latents") or ():
            if reference.ndim != 4 or reference.shape[1] != x.shape[1] or reference.shape[0] not in (1, call.batch):
                what = "A reference latent of shape {shape} does not go with a latent of {shape2}."
                fix = "Encode the reference image with the VAE of {title}."
                raise RequestError(what, fix, shape=tuple(reference.shape), shape2=tuple(x.shape), title=self.title)
            pictures.append(reference.to(x).expand(call.batch, -1, -1, -1))
        # Channels slowest; odd sides continue circularly.
        tokens = [F.pixel_unshuffle(pad_sides(each, self.patch), self.patch).flatten(2).mT for each in pictures]
        ids = [self._position_ids(each, number * self.index_step) for number, each in enumerate(pictures)]
        text_ids = torch.zeros(call.context.shape[1], self.axes, device=x.device, dtype=torch.float32)
        return {"hidden_states": torch.cat(tokens, dim=1), "img_ids": torch.cat(ids), "txt_ids": text_ids}

    def from_transformer(self, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """(B, tokens, C * patch²), those of the latent first -> (B, C, H, W) of the height and width of x."""
        height, width = x.shape[-2:]
        rows, columns = tokens_along(height, self.patch), tokens_along(width, self.patch)
        channels = output.shape[-1] // self.patch**2
        patches = output[:, : rows * columns].reshape(-1, rows, columns, channels, self.patch, self.patch)
        latent = patches.permute(0, 3, 1, 4, 2, 5).reshape(-1, channels, rows * self.patch, columns * self.patch)
        return latent[:, :, :height, :width]

    def output_shape(self, x_shape: tuple[int, ...], config: Mapping[str, Any]) -> tuple[int, ...]:
        """(B, out_channels / patch², H, W): the latent without the channels that Fill, Canny and Depth append."""
        return (x_shape[0], (config["out_channels"] or config["in_channels"]) // self.patch**2, *x_shape[2:])

    def _position_ids(self, picture: torch.Tensor, index: int) -> torch.Tensor:
        """(tokens, axes) of a latent (B, C, H, W)."""
        counts = (tokens_along(side, self.patch) for side in picture.shape[-2:])
        sides = (torch.arange(count, device=picture.device, dtype=torch.float32) for count in counts)
        grid = torch.meshgrid(*sides, indexing="ij")
        others = [torch.zeros_like(grid[0])] * (self.axes - 3)
        return torch.stack((torch.full_like(grid[0], index), *grid, *others), dim=-1).reshape(-1, self.axes)


def _pooled(call: Call) -> torch.Tensor:
    """Zeros without a pooled text."""
    pooled = call.pooled_text()
    return call.x.new_zeros(call.batch, call.config["pooled_projection_dim"]) if pooled is None else pooled


def _guidance(call: Call) -> torch.Tensor | None:
    """The usual one where none is given."""
    guidance = call.guidance()
    if guidance is None and call.config["guidance_embeds"]:
        return torch.full((call.batch,), _USUAL_GUIDANCE, device=call.x.device, dtype=torch.float32)
    return guidance


_SINGLE = "single_transformer_blocks"
_ATTENTION = ("transformer_blocks.*.attn", f"{_SINGLE}.*.attn")

FLUX = TokenSpec(
    title="FLUX.1",
    transformer_class="FluxTransformer2DModel",
    cut=(
        replace(TEXT_AND_IMAGE, projects={}),
        replace(TEXT_AND_IMAGE, path=_SINGLE, modulations={"temb": ("norm.linear",)}, parallel=True, projects={}),
    ),
    self_attention=_ATTENTION,
    timestep_embedder="time_text_embed",
    timestep_scale=1000.0,
    axes=3,
    index_step=1,
    extras=frozenset({"y", "guidance", "ref_latents"}),
    arguments={"pooled_projections": _pooled, "guidance": _guidance},
    widths={
        "hidden_states": "in_channels",
        "encoder_hidden_states": "joint_attention_dim",
        "pooled_projections": "pooled_projection_dim",
    },
)


def _text_ids(call: Call) -> torch.Tensor:
    """A text token's place is its number, on the last axis of four."""
    places = torch.arange(call.context.shape[1], device=call.x.device, dtype=torch.float32)
    return F.pad(places[:, None], (3, 0))


_SINGLE2 = Blocks(
    _SINGLE, {"hidden_states": 1}, ("hidden_states",), joint={"image_rotary_emb": 0},
    alike=("temb_mod", "joint_attention_kwargs", "split_hidden_states"),
    whole_with=("encoder_hidden_states", "text_seq_len"), latent="hidden_states",
)  # fmt: skip

FLUX2 = TokenSpec(
    title="FLUX.2",
    transformer_class="Flux2Transformer2DModel",
    cut=(
        replace(TEXT_AND_IMAGE, alike=("temb_mod_img", "temb_mod_txt", "joint_attention_kwargs"), modulations={}),
        _SINGLE2,
    ),
    self_attention=_ATTENTION,
    # The bare sinusoid: the embedder around it casts what it gets to the timestep's dtype, which must be the model's.
    timestep_embedder="time_guidance_embed.time_proj",
    timestep_scale=1000.0,
    token=1,
    patch=1,
    axes=4,
    index_step=10,
    extras=frozenset({"guidance", "ref_latents"}),
    arguments={"guidance": Call.guidance, "txt_ids": _text_ids},
    widths={"hidden_states": "in_channels", "encoder_hidden_states": "joint_attention_dim"},
)
