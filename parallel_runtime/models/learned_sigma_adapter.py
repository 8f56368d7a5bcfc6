"""What PixArt's and HunyuanDiT's adapters share: whole latents in and out, and a variance that ComfyUI leaves unused.

Both transformers cut the latent into tokens themselves (their `pos_embed`) and return a latent with twice the
channels: the prediction, then what it says of the variance (Nichol and Dhariwal, arXiv 2102.09672).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import RequestError
from .call_checks import check_call

PATCH = 2
"""A token is a PATCH x PATCH square of latent pixels."""


def tokens(size: int) -> int:
    """Tokens along one side; a side that PATCH does not divide is padded."""
    return -(-size // PATCH)


class LearnedSigmaAdapter:
    """Base of the adapters; see `Adapter`. Latents are (B, C, H, W) in the latent scale that ComfyUI's class has."""

    title: str
    extras: frozenset[str]

    def from_transformer(self, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """(B, 2 * C, H, W), maybe padded below and to the right -> (B, C, H, W), the prediction alone."""
        return output[:, : x.shape[1], : x.shape[2], : x.shape[3]]

    def output_shape(self, x_shape: tuple[int, ...], config: Mapping[str, Any]) -> tuple[int, ...]:
        """The latent's own."""
        return x_shape

    def sequence_length(self, x_shape: tuple[int, ...], context_shape: tuple[int, ...]) -> int:
        """Image tokens alone: the text stays in the cross-attention, which is not split."""
        return tokens(x_shape[-2]) * tokens(x_shape[-1])

    def check(
        self, x: torch.Tensor, context: torch.Tensor, config: Mapping[str, Any], extras: Mapping[str, Any]
    ) -> None:
        """`check_call`, and the latent's channels, which `ModelSpec.check_widths` does not see.

        Raises:
            RequestError: a call or a latent that is not this model's.
        """
        check_call(self.title, x, context, extras, self.extras)
        if x.shape[1] != config["in_channels"]:
            raise RequestError(
                f"{self.title} takes latents of {config['in_channels']} channels, and got {tuple(x.shape)}.",
                f"Use a latent made for {self.title}.",
            )

    def rows(self, name: str, value: torch.Tensor, batch: int) -> torch.Tensor:
        """One row for every batch item, (1 or B, ...) -> (B, ...), contiguous.

        Raises:
            RequestError: another number of rows.
        """
        if value.ndim == 0 or value.shape[0] not in (1, batch):
            raise RequestError(
                f"{self.title} got {name} of shape {tuple(value.shape)} for a batch of {batch}.",
                "Check the nodes that change the conditioning.",
            )
        return value.expand(batch, *value.shape[1:]).contiguous()
