"""PixArt's two conventions: ComfyUI's `diffusion_model(...)` call and diffusers' PixArtTransformer2DModel.forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import RequestError
from .call_checks import per_item
from .learned_sigma_adapter import PATCH, LearnedSigmaAdapter

_PIXELS = 8
"""Picture pixels along one side of a latent pixel."""


class PixArtAdapter(LearnedSigmaAdapter):
    """See `Adapter`. The timestep is 0..999, and the prediction is the noise.

    Source of the micro-conditions (size and aspect ratio of the picture, PixArt-α only): SDXL, arXiv 2307.01952.
    """

    title = "PixArt"
    extras = frozenset({"c_size", "c_ar"})

    def to_transformer(
        self, x: torch.Tensor, timestep: torch.Tensor, context: torch.Tensor, config: Mapping[str, Any], **extras: Any
    ) -> dict[str, Any]:
        """Arguments of PixArtTransformer2DModel.forward.

        Args:
            x: (B, 4, H, W) in the model's dtype, H and W even.
            timestep: (B,) float32, 0..999.
            context: (1 or B, T, caption_channels), without padding: ComfyUI gives PixArt no text mask.
            config: the diffusers config; `use_additional_conditions` tells α from Σ, which knows no micro-conditions.
            extras: c_size (1 or B, 2), height and width of the picture in pixels; c_ar (1 or B, 1), height over
                width. Without them they are the latent's.

        Raises:
            RequestError: shapes that do not fit the model, or an extra that is not carried.
        """
        self.check(x, context, config, extras)
        batch, _, height, width = x.shape
        if height % PATCH or width % PATCH:
            raise RequestError(
                f"PixArt takes latents of even height and width, and got {height} x {width}.",
                f"Choose a picture size that {PATCH * _PIXELS} divides.",
            )
        arguments: dict[str, Any] = {
            "hidden_states": x,
            "encoder_hidden_states": self.rows("text", context, batch),
            "timestep": per_item(self.title, "timestep", timestep, batch),
        }
        if config["use_additional_conditions"]:
            size, ratio = extras.get("c_size"), extras.get("c_ar")
            if size is None:
                # Filled on the GPU: numbers that come from the CPU would wait for it, at every step.
                size = torch.cat([x.new_full((1, 1), side * _PIXELS) for side in (height, width)], dim=1)
            if ratio is None:
                ratio = x.new_full((1, 1), height / width)
            arguments["added_cond_kwargs"] = {
                "resolution": self.rows("c_size", size, batch),
                "aspect_ratio": self.rows("c_ar", ratio, batch),
            }
        return arguments
