"""Latents and reference images as tokens with position ids, as the FLUX families have them.

Sources: Black Forest Labs' flux and flux2 (sampling); reference images: FLUX.1 Kontext, UXO, FLUX.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import RequestError
from ...said import said
from .adapter import Adapter, Call, pad_sides, tokens_along

REFERENCE_METHODS = ("offset", "index", "uxo")


@dataclass(frozen=True)
class TokenAdapter(Adapter):
    """Latents are (B, C, H, W) in ComfyUI's scale of the family, sigma is the flow time in [0, 1].

    Every family carries reference images: `ref_latents`, a list of (1 or B, C, h, w), and `ref_latents_method`, one of
    REFERENCE_METHODS.

    Args:
        patch: a token is a patch x patch square of latent pixels.
        axes: position ids of a token; the first three are index, row and column, the others are 0 in a picture.
        index_step: between the indices of reference images that have one each.
        reference_method: where reference images lie unless the graph says so.
    """

    patch: int
    axes: int
    index_step: int
    reference_method: str

    def of_latent(self, call: Call) -> dict[str, Any]:
        """The latent and its references as tokens (B, tokens, width), and the places of these and of the text's,
        float32 (tokens, axes)."""
        call.check(self.extras)
        x, references = call.x, list(call.extras.get("ref_latents") or ())
        method = call.extras.get("ref_latents_method")
        self._check_references(x, references, method)
        latent = (x.shape[-2], x.shape[-1])
        tokens, ids = [self._pack(x)], [self._position_ids(latent, device=x.device)]
        sizes = [(reference.shape[-2], reference.shape[-1]) for reference in references]
        places = self._places(sizes, latent, method or self.reference_method)
        for reference, size, place in zip(references, sizes, places, strict=True):
            tokens.append(self._pack(reference.to(x).expand(x.shape[0], -1, -1, -1)))
            ids.append(self._position_ids(size, place, x.device))
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

    def _check_references(self, x: torch.Tensor, references: Sequence[torch.Tensor], method: str | None) -> None:
        """Refuse reference images that do not go with the latent, or lie where the pool cannot put them.

        Raises:
            RequestError: naming the method or the shape.
        """
        if references and method is not None and method not in REFERENCE_METHODS:
            raise RequestError(
                said(
                    "Reference latents method {method} is not supported for {title} in the diffusers network.",
                    method=method,
                    title=self.title,
                ),
                said("Choose one of {reference_methods}.", reference_methods=", ".join(REFERENCE_METHODS)),
            )
        for reference in references:
            if reference.ndim != 4 or reference.shape[1] != x.shape[1] or reference.shape[0] not in (1, x.shape[0]):
                raise RequestError(
                    said(
                        "A reference latent of shape {shape} does not go with a latent of {shape2}.",
                        shape=tuple(reference.shape),
                        shape2=tuple(x.shape),
                    ),
                    said("Encode the reference image with the VAE of {title}.", title=self.title),
                )

    def _pack(self, latent: torch.Tensor) -> torch.Tensor:
        """(B, C, H, W) -> (B, tokens, C * patch²), channel slowest; odd sides continue circularly."""
        batch, channels, height, width = latent.shape
        rows, columns = tokens_along(height, self.patch), tokens_along(width, self.patch)
        patches = pad_sides(latent, self.patch).reshape(batch, channels, rows, self.patch, columns, self.patch)
        return patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows * columns, channels * self.patch**2)

    def _position_ids(
        self, size: tuple[int, int], place: tuple[int, int, int] = (0, 0, 0), device: torch.device | None = None
    ) -> torch.Tensor:
        """(tokens, axes); `size` and the last two of `place` are in latent pixels, ids are in tokens."""
        index, top, left = place
        rows, columns = (
            torch.arange(tokens_along(length, self.patch), device=device, dtype=torch.float32)
            + tokens_along(start, self.patch)
            for length, start in zip(size, (top, left), strict=True)
        )
        grid = torch.meshgrid(rows, columns, indexing="ij")
        others = [torch.zeros_like(grid[0])] * (self.axes - 3)
        return torch.stack((torch.full_like(grid[0], index), *grid, *others), dim=-1).reshape(-1, self.axes)

    def _places(
        self, sizes: Sequence[tuple[int, int]], latent: tuple[int, int], method: str
    ) -> Iterator[tuple[int, int, int]]:
        """Yield (index, top, left) in latent pixels of each reference image of (height, width).

        offset: all at index 1, tiled beside or below one another, whichever keeps the whole squarer.
        index: one index each. uxo: index 0, on the diagonal that goes on from the latent's lower right corner.
        """
        bottom = right = 0
        for number, (height, width) in enumerate(sizes, start=1):
            if method == "index":
                yield number * self.index_step, 0, 0
            elif method == "uxo":
                first_row, first_column = (tokens_along(side, self.patch) * self.patch for side in latent)
                yield 0, first_row + bottom, first_column + right
                bottom, right = bottom + height, right + width
            else:
                beside = height + bottom > width + right
                top, left = (0, right) if beside else (bottom, 0)
                yield 1, top, left
                bottom, right = max(bottom, top + height), max(right, left + width)
