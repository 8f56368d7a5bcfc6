"""SD3's two conventions: ComfyUI's `diffusion_model(...)` call and diffusers' SD3Transformer2DModel.forward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import RequestError
from .call_checks import check_call, per_item, pooled_text

PATCH = 2
"""A token is a PATCH x PATCH square of latent pixels."""


def _tokens(size: int) -> int:
    """Tokens along one side; a side that PATCH does not divide is padded."""
    return -(-size // PATCH)


class SD3Adapter:
    """See `Adapter`. Latents are (B, 16, H, W) in ComfyUI's SD3 latent scale; the timestep is sigma * 1000."""

    title = "SD3/3.5"
    extras = frozenset({"y"})

    def to_transformer(
        self, x: torch.Tensor, timestep: torch.Tensor, context: torch.Tensor, config: Mapping[str, Any], **extras: Any
    ) -> dict[str, Any]:
        """Arguments of SD3Transformer2DModel.forward.

        Args:
            x: (B, in_channels, H, W) in the model's dtype; odd sides are continued circularly, as in ComfyUI.
            timestep: (B,) float32 in [0, 1000], kept as it is.
            context: (1 or B, T, joint_attention_dim).
            config: the diffusers config.
            extras: y (1 or B, pooled_projection_dim), the pooled text.

        Raises:
            RequestError: shapes that do not fit the model, an extra that is not carried, or no pooled text.
        """
        check_call(self.title, x, context, extras, self.extras)
        self._check(x, extras, config)
        below, right = -x.shape[-2] % PATCH, -x.shape[-1] % PATCH
        if below or right:
            x = torch.nn.functional.pad(x, (0, right, 0, below), mode="circular")
        return {
            "hidden_states": x,
            "encoder_hidden_states": context.expand(x.shape[0], -1, -1),
            "pooled_projections": pooled_text(self.title, extras["y"], x),
            "timestep": per_item(self.title, "timestep", timestep, x.shape[0]),
        }

    def from_transformer(self, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """(B, C, H, W) of the padded latent -> the height and width of x."""
        return output[:, :, : x.shape[-2], : x.shape[-1]]

    def output_shape(self, x_shape: tuple[int, ...], config: Mapping[str, Any]) -> tuple[int, ...]:
        """(B, out_channels, H, W)."""
        return (x_shape[0], config["out_channels"], *x_shape[2:])

    def sequence_length(self, x_shape: tuple[int, ...], context_shape: tuple[int, ...]) -> int:
        """Image tokens and text tokens of one forward."""
        return math.prod(_tokens(side) for side in x_shape[-2:]) + context_shape[1]

    def _check(self, x: torch.Tensor, extras: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        channels, height, width = x.shape[1:]
        if channels != config["in_channels"]:
            raise RequestError(
                f"{self.title} takes latents of {config['in_channels']} channels, and got {channels} channels.",
                f"Use a latent made for {self.title}.",
            )
        # The model has a table of positions, and a picture cannot be larger than it.
        places = config["pos_embed_max_size"]
        if _tokens(height) > places or _tokens(width) > places:
            raise RequestError(
                f"A latent of {height} x {width} is larger than the {places * PATCH} x {places * PATCH} that this "
                f"{self.title} checkpoint has positions for.",
                "Make a smaller picture, and upscale it.",
            )
        if extras.get("y") is None:
            raise RequestError(
                f"{self.title} needs a pooled text beside the text tokens.",
                f"Encode the prompt with the text encoders of {self.title}.",
            )
