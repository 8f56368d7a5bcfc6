"""Sides of latents that a patch does not divide."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .call import Adapter, Call


def tokens_along(size: int, patch: int) -> int:
    """Tokens along one side of `size` latent pixels, of which each token has `patch`; the last may be padding."""
    return -(-size // patch)


def pad_sides(x: torch.Tensor, patch: int) -> torch.Tensor:
    """(..., H, W) with sides that `patch` divides: they continue circularly, as in ComfyUI. Frames stay."""
    below, right = -x.shape[-2] % patch, -x.shape[-1] % patch
    if not below and not right:
        return x
    return torch.nn.functional.pad(x, (0, right, 0, below) + (0, 0) * (x.ndim - 4), mode="circular")


@dataclass(frozen=True)
class WholeLatentAdapter(Adapter):
    """Latents are (B, C, [frames,] H, W) in the latent scale that ComfyUI's class of the model has.

    Args:
        check: refuses, before anything is made, what else this family does not take.
        latent: diffusers' argument that x is.
        patch: latent pixels along one side of a token; x is padded to it and cut back.
        frames: latents are videos.
        learned_sigma: behind the prediction come as many channels about its variance (Nichol and Dhariwal, arXiv
            2102.09672), which ComfyUI leaves unused.
    """

    check: Callable[[Call], None] = Call.check_channels
    latent: str = "hidden_states"
    patch: int = 2
    frames: bool = False
    learned_sigma: bool = False

    def of_latent(self, call: Call) -> dict[str, Any]:
        """The latent, padded to whole tokens."""
        call.check(self.extras, dims=5 if self.frames else 4)
        self.check(call)
        return {self.latent: pad_sides(call.x, self.patch)}

    def from_transformer(self, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The padded latent -> the height and width of x, and the prediction alone."""
        channels = x.shape[1] if self.learned_sigma else output.shape[1]
        return output[:, :channels, ..., : x.shape[-2], : x.shape[-1]]

    def output_shape(self, x_shape: tuple[int, ...], config: Mapping[str, Any]) -> tuple[int, ...]:
        """That of x, without the channels that a start image or a mask append."""
        return x_shape if self.learned_sigma else (x_shape[0], config["out_channels"], *x_shape[2:])
