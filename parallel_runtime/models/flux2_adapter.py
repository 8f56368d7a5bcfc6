"""FLUX.2's two conventions: ComfyUI's `diffusion_model(...)` call and diffusers' Flux2Transformer2DModel.forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .call_checks import per_item
from .flux_adapter import FluxAdapter
from .flux_tokens import TokenLayout


class Flux2Adapter(FluxAdapter):
    """See `Adapter`. Latents are (B, 128, H, W), a token per latent pixel; sigma is the flow time in [0, 1].

    `y` is accepted and not used, as in ComfyUI: conditionings of other text encoders carry one.
    """

    title = "FLUX.2"
    layout = TokenLayout(patch=1, axes=4, index_step=10, reference_method="index")

    def to_transformer(
        self, x: torch.Tensor, timestep: torch.Tensor, context: torch.Tensor, config: Mapping[str, Any], **extras: Any
    ) -> dict[str, Any]:
        """Arguments of Flux2Transformer2DModel.forward.

        Args:
            x: (B, in_channels, H, W) in the model's dtype.
            timestep: (B,) float32 sigma, kept as it is: the transformer scales it.
            context: (1 or B, T, joint_attention_dim).
            config: the diffusers config; `guidance_embeds` decides whether guidance is passed.
            extras: guidance (B,) or None (embedding left out); ref_latents, a list of (1 or B, C, h, w);
                ref_latents_method, one of REFERENCE_METHODS; y, not used.

        Raises:
            RequestError: shapes that do not fit the model, an extra or a method that is not carried.
        """
        arguments = self.token_arguments(x, timestep, context, extras)
        # A text token's place is its number, on the last axis.
        arguments["txt_ids"][:, -1] = torch.arange(context.shape[1], device=x.device)
        guidance = extras.get("guidance")
        if config["guidance_embeds"] and guidance is not None:
            arguments["guidance"] = per_item(self.title, "guidance", guidance.to(x.device), x.shape[0])
        return arguments
