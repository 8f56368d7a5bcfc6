"""SDXL's two conventions: ComfyUI's `diffusion_model(...)` call and diffusers' UNet2DConditionModel.forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import RequestError
from .call_checks import check_call, per_item, pooled_text


class SDXLAdapter:
    """See `Adapter`. The timestep is 0..999, and the prediction is the noise (v in some finetunes: ComfyUI knows)."""

    title = "SDXL"
    extras = frozenset({"y"})

    def to_transformer(
        self, x: torch.Tensor, timestep: torch.Tensor, context: torch.Tensor, config: Mapping[str, Any], **extras: Any
    ) -> dict[str, Any]:
        """Arguments of UNet2DConditionModel.forward.

        Args:
            x: (B, in_channels, H, W) in the model's dtype, of any height and width; inpainting models have nine
                channels, with the mask and the masked picture behind the latent.
            timestep: (B,) float32, 0..999.
            context: (1 or B, T, cross_attention_dim).
            config: the diffusers config.
            extras: y (1 or B, projection_class_embeddings_input_dim), the pooled text and behind it the sinusoids of
                the micro-conditions (sizes of the original and the target, place of the crop; arXiv 2307.01952).

        Raises:
            RequestError: shapes that do not fit the model, an extra that is not carried, or no y.
        """
        check_call(self.title, x, context, extras, self.extras)
        if x.shape[1] != config["in_channels"]:
            raise RequestError(
                f"{self.title} takes {config['in_channels']} input channels in this checkpoint, and got {x.shape[1]}.",
                f"Use a latent made for {self.title}, and for an inpainting checkpoint its conditioning node.",
            )
        y, width = extras.get("y"), config["projection_class_embeddings_input_dim"]
        if not isinstance(y, torch.Tensor) or y.shape[-1] != width:
            got = "none" if not isinstance(y, torch.Tensor) else f"one of width {y.shape[-1]}"
            raise RequestError(
                f"{self.title} takes a pooled text with sizes of width {width} in this checkpoint, and got {got}.",
                f"Encode the prompt with the text encoders of {self.title}.",
            )
        pooled = pooled_text(self.title, y, x)
        # diffusers puts the sinusoids of `time_ids` behind `text_embeds`. They are in y: of no numbers come no more.
        micro = {"text_embeds": pooled, "time_ids": pooled.new_empty((x.shape[0], 0))}
        return {
            "sample": x,
            "timestep": per_item(self.title, "timestep", timestep, x.shape[0]),
            "encoder_hidden_states": context.expand(x.shape[0], -1, -1),
            "added_cond_kwargs": micro,
        }

    def from_transformer(self, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """As it is: both conventions have (B, out_channels, H, W)."""
        return output

    def output_shape(self, x_shape: tuple[int, ...], config: Mapping[str, Any]) -> tuple[int, ...]:
        """(B, out_channels, H, W)."""
        return (x_shape[0], config["out_channels"], *x_shape[2:])

    def sequence_length(self, x_shape: tuple[int, ...], context_shape: tuple[int, ...]) -> int:
        """Tokens at a quarter of the resolution, where most of the transformer blocks are. Text has none among them."""
        height, width = x_shape[-2:]
        return -(-height // 4) * -(-width // 4)
