"""Latents and reference images as tokens with position ids, as the FLUX families have them.

Sources: Black Forest Labs' flux and flux2 (sampling); reference images: FLUX.1 Kontext, FLUX.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ...errors import RequestError
from .adapter import Adapter, Call, pad_sides, tokens_along


@dataclass(frozen=True)
class TokenAdapter(Adapter):
    """Latents are (B, C, H, W) in ComfyUI's scale of the family, sigma is the flow time in [0, 1].

    Every family carries reference images, `ref_latents`, a list of (1 or B, C, h, w): each has an index of its own.

    Args:
        patch: a token is a patch x patch square of latent pixels.
        axes: position ids of a token; the first three are index, row and column, the others are 0 in a picture.
        index_step: between the indices of the latent and of reference images.
    """

    patch: int
    axes: int
    index_step: int

    def of_latent(self, call: Call) -> dict[str, Any]:
        """The latent and its references as tokens (B, tokens, width), and the places of these and of the text's,
        float32 (tokens, axes)."""
        call.check(self.extras)
        x, references = call.x, list(call.extras.get("ref_latents") or ())
        self._check_references(x, references)
        pictures = [x, *(reference.to(x).expand(x.shape[0], -1, -1, -1) for reference in references)]
        # Channels slowest; odd sides continue circularly.
        tokens = [F.pixel_unshuffle(pad_sides(each, self.patch), self.patch).flatten(2).mT for each in pictures]
        ids = [
            self._position_ids((picture.shape[-2], picture.shape[-1]), number * self.index_step, x.device)
            for number, picture in enumerate(pictures)
        ]
        text_ids = torch.zeros(call.context.shape[1], self.axes, device=x.device, dtype=torch.float32)
        return {"hidden_states": torch.cat(tokens, dim=1), "img_ids": torch.cat(ids), "txt_ids": text_ids}

    def from_transformer(self, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """(B, tokens, C * patch²), those of the latent first -> (B, C, H, W) with the height and width of x."""
        height, width = x.shape[-2:]
        rows, columns = tokens_along(height, self.patch), tokens_along(width, self.patch)
        channels = output.shape[-1] // self.patch**2
        patches = output[:, : rows * columns].reshape(-1, rows, columns, channels, self.patch, self.patch)
        latent = patches.permute(0, 3, 1, 4, 2, 5).reshape(-1, channels, rows * self.patch, columns * self.patch)
        return latent[:, :, :height, :width]

    def output_shape(self, x_shape: tuple[int, ...], config: Mapping[str, Any]) -> tuple[int, ...]:
        """(B, out_channels / patch², H, W): the latent without the channels that Fill, Canny and Depth append."""
        return (x_shape[0], (config["out_channels"] or config["in_channels"]) // self.patch**2, *x_shape[2:])

    def _check_references(self, x: torch.Tensor, references: Sequence[torch.Tensor]) -> None:
        """Refuse reference images that do not go with the latent."""
        for reference in references:
            if reference.ndim != 4 or reference.shape[1] != x.shape[1] or reference.shape[0] not in (1, x.shape[0]):
                raise RequestError(
                    "A reference latent of shape {shape} does not go with a latent of {shape2}.",
                    "Encode the reference image with the VAE of {title}.",
                    shape=tuple(reference.shape),
                    shape2=tuple(x.shape),
                    title=self.title,
                )

    def _position_ids(self, size: tuple[int, int], index: int, device: torch.device) -> torch.Tensor:
        """(tokens, axes) of a picture of (height, width) in latent pixels."""
        sides = (torch.arange(tokens_along(side, self.patch), device=device, dtype=torch.float32) for side in size)
        grid = torch.meshgrid(*sides, indexing="ij")
        others = [torch.zeros_like(grid[0])] * (self.axes - 3)
        return torch.stack((torch.full_like(grid[0], index), *grid, *others), dim=-1).reshape(-1, self.axes)
