"""FLUX.1's two conventions: ComfyUI's `diffusion_model(...)` call and diffusers' FluxTransformer2DModel.forward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import RequestError

PATCH = 2
"""A token is a PATCH x PATCH square of latent pixels."""
REFERENCE_METHODS = ("offset", "index", "uxo")


def _tokens(size: int) -> int:
    """Tokens along one side; a side that PATCH does not divide is padded."""
    return -(-size // PATCH)


def _pack(latent: torch.Tensor) -> torch.Tensor:
    """(B, C, H, W) -> (B, tokens, C * PATCH * PATCH), channel slowest; odd sides continue circularly."""
    batch, channels, height, width = latent.shape
    rows, columns = _tokens(height), _tokens(width)
    below, right = rows * PATCH - height, columns * PATCH - width
    if below or right:
        latent = torch.nn.functional.pad(latent, (0, right, 0, below), mode="circular")
    patches = latent.reshape(batch, channels, rows, PATCH, columns, PATCH)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows * columns, channels * PATCH * PATCH)


def _position_ids(height: int, width: int, index: int = 0, top: int = 0, left: int = 0, device=None) -> torch.Tensor:
    """(tokens, 3) float32 of (index, row, column); sizes and offsets in latent pixels, ids in tokens."""
    rows = torch.arange(_tokens(height), device=device, dtype=torch.float32) + _tokens(top)
    columns = torch.arange(_tokens(width), device=device, dtype=torch.float32) + _tokens(left)
    grid = torch.meshgrid(rows, columns, indexing="ij")
    return torch.stack((torch.full_like(grid[0], index), *grid), dim=-1).reshape(-1, 3)


def _reference_places(sizes: Sequence[tuple[int, int]], latent: tuple[int, int], method: str):
    """Yield (index, top, left) in latent pixels of each reference image of (height, width).

    offset: all at index 1, tiled beside or below one another, whichever keeps the whole squarer.
    index: one index each. uxo: index 0, on the diagonal that goes on from the latent's lower right corner.
    """
    bottom = right = 0
    for number, (height, width) in enumerate(sizes, start=1):
        if method == "index":
            yield number, 0, 0
        elif method == "uxo":
            yield 0, _tokens(latent[0]) * PATCH + bottom, _tokens(latent[1]) * PATCH + right
            bottom, right = bottom + height, right + width
        else:
            beside = height + bottom > width + right
            top, left = (0, right) if beside else (bottom, 0)
            yield 1, top, left
            bottom, right = max(bottom, top + height), max(right, left + width)


def _per_item(value: torch.Tensor, batch: int, name: str) -> torch.Tensor:
    """One value per batch item, as (B,)."""
    flat = value.reshape(-1)
    if flat.shape[0] not in (1, batch):
        raise RequestError(
            f"FLUX.1 got {flat.shape[0]} values of {name} for a batch of {batch}.",
            "Check the nodes that change the conditioning.",
        )
    return flat.expand(batch)


class FluxAdapter:
    """See `Adapter`. Latents are (B, C, H, W) in ComfyUI's FLUX latent scale, sigma is the flow time in [0, 1].

    Source of the packing: Black Forest Labs' flux (sampling.prepare); of the reference images: FLUX.1 Kontext, UXO.
    """

    extras = frozenset({"y", "guidance", "ref_latents", "ref_latents_method"})

    def to_transformer(
        self, x: torch.Tensor, timestep: torch.Tensor, context: torch.Tensor, config: Mapping[str, Any], **extras: Any
    ) -> dict[str, Any]:
        """Arguments of FluxTransformer2DModel.forward.

        Args:
            x: (B, C, H, W) in the model's dtype; extra input channels (Fill, Canny, Depth) already appended.
            timestep: (B,) float32 sigma, kept as it is: the transformer scales it.
            context: (1 or B, T, joint_attention_dim).
            config: the diffusers config; `guidance_embeds` decides whether guidance is passed.
            extras: y (1 or B, >= pooled_projection_dim) or None (zeros); guidance (B,) or None (embedding left out);
                ref_latents, a list of (1 or B, C, h, w); ref_latents_method, one of REFERENCE_METHODS.

        Raises:
            RequestError: shapes that do not fit the model, an extra or a method that is not carried.
        """
        self._check(x, context, extras)
        batch, device = x.shape[0], x.device
        references = list(extras.get("ref_latents") or ())
        method = extras.get("ref_latents_method") or REFERENCE_METHODS[0]
        tokens, ids = [_pack(x)], [_position_ids(x.shape[-2], x.shape[-1], device=device)]
        sizes = [(reference.shape[-2], reference.shape[-1]) for reference in references]
        places = _reference_places(sizes, (x.shape[-2], x.shape[-1]), method)
        for reference, (index, top, left) in zip(references, places, strict=True):
            tokens.append(_pack(reference.to(x).expand(batch, -1, -1, -1)))
            ids.append(_position_ids(reference.shape[-2], reference.shape[-1], index, top, left, device))
        arguments = {
            "hidden_states": torch.cat(tokens, dim=1),
            "encoder_hidden_states": context.expand(batch, -1, -1),
            "pooled_projections": self._pooled(extras.get("y"), x, config["pooled_projection_dim"]),
            "timestep": _per_item(timestep, batch, "timestep"),
            "img_ids": torch.cat(ids),
            "txt_ids": torch.zeros(context.shape[1], 3, device=device, dtype=torch.float32),
        }
        if config["guidance_embeds"]:
            arguments["guidance"] = self._guidance(extras.get("guidance"), x)
        return arguments

    def from_transformer(self, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """(B, tokens, C * PATCH * PATCH), image tokens first -> (B, C, H, W) with the height and width of x."""
        height, width = x.shape[-2:]
        rows, columns = _tokens(height), _tokens(width)
        channels = output.shape[-1] // (PATCH * PATCH)
        patches = output[:, : rows * columns].reshape(-1, rows, columns, channels, PATCH, PATCH)
        latent = patches.permute(0, 3, 1, 4, 2, 5).reshape(-1, channels, rows * PATCH, columns * PATCH)
        return latent[:, :, :height, :width]

    def output_shape(self, x_shape: tuple[int, ...], config: Mapping[str, Any]) -> tuple[int, ...]:
        """(B, out_channels / PATCH², H, W): the latent without the channels that Fill, Canny and Depth append."""
        return (x_shape[0], config["out_channels"] // (PATCH * PATCH), *x_shape[2:])

    def sequence_length(self, x_shape: tuple[int, ...], context_shape: tuple[int, ...]) -> int:
        """Image tokens and text tokens of one forward, without reference images."""
        return _tokens(x_shape[-2]) * _tokens(x_shape[-1]) + context_shape[1]

    def _check(self, x: torch.Tensor, context: torch.Tensor, extras: Mapping[str, Any]) -> None:
        """What the widths of the arguments (`ModelSpec.check_widths`) do not show. Shapes only: runs on meta too."""
        if x.ndim != 4 or context.ndim != 3 or context.shape[0] not in (1, x.shape[0]):
            raise RequestError(
                f"FLUX.1 takes a latent (batch, channels, height, width) and text (batch, tokens, width), and got "
                f"{tuple(x.shape)} and {tuple(context.shape)}.",
                "Use a latent and a prompt made for FLUX.1.",
            )
        if unknown := sorted(set(extras) - self.extras):
            raise RequestError(
                f"FLUX.1 in the pool does not take {', '.join(unknown)}.", "Remove the node that adds it."
            )
        method = extras.get("ref_latents_method") or REFERENCE_METHODS[0]
        references = extras.get("ref_latents") or ()
        if references and method not in REFERENCE_METHODS:
            raise RequestError(
                f"Reference latents method {method} is not supported for FLUX.1 in the pool.",
                f"Choose one of {', '.join(REFERENCE_METHODS)}.",
            )
        for reference in references:
            if reference.ndim != 4 or reference.shape[1] != x.shape[1] or reference.shape[0] not in (1, x.shape[0]):
                raise RequestError(
                    f"A reference latent of shape {tuple(reference.shape)} does not go with a latent of "
                    f"{tuple(x.shape)}.",
                    "Encode the reference image with FLUX's VAE.",
                )

    @staticmethod
    def _pooled(y: torch.Tensor | None, x: torch.Tensor, dim: int) -> torch.Tensor:
        if y is None:
            return x.new_zeros(x.shape[0], dim)
        if y.ndim != 2 or y.shape[0] not in (1, x.shape[0]):
            raise RequestError(
                f"FLUX.1 takes a pooled text of shape ({x.shape[0]}, {dim}), and got {tuple(y.shape)}.",
                "Encode the prompt with FLUX's text encoders (DualCLIPLoader, type flux).",
            )
        # Wider pooled texts are cut, as ComfyUI does.
        return y[:, :dim].to(x).expand(x.shape[0], -1)

    @staticmethod
    def _guidance(guidance: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
        # ComfyUI fills in 3.5 itself, so None means that a node took guidance away; NaN tells models/flux.py so.
        if guidance is None:
            return torch.full((x.shape[0],), math.nan, device=x.device, dtype=torch.float32)
        return _per_item(guidance.to(x.device), x.shape[0], "guidance")
