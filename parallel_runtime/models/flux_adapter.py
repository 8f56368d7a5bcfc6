"""FLUX.1's two conventions: ComfyUI's `diffusion_model(...)` call and diffusers' FluxTransformer2DModel.forward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from .call_checks import check_call, per_item, pooled_text
from .flux_tokens import TokenLayout, check_references


class FluxAdapter:
    """See `Adapter`. Latents are (B, C, H, W) in ComfyUI's FLUX latent scale, sigma is the flow time in [0, 1]."""

    title = "FLUX.1"
    layout = TokenLayout(patch=2, axes=3, index_step=1, reference_method="offset")
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
        arguments = self.token_arguments(x, timestep, context, extras)
        y, width = extras.get("y"), config["pooled_projection_dim"]
        # Wider pooled texts are cut, as ComfyUI does.
        arguments["pooled_projections"] = (
            x.new_zeros(x.shape[0], width) if y is None else pooled_text(self.title, y, x)[:, :width]
        )
        if config["guidance_embeds"]:
            arguments["guidance"] = self._guidance(extras.get("guidance"), x)
        return arguments

    def token_arguments(
        self, x: torch.Tensor, timestep: torch.Tensor, context: torch.Tensor, extras: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The arguments that FLUX.1 and FLUX.2 share: tokens, their position ids, and the timestep."""
        check_call(self.title, x, context, extras, self.extras)
        references, method = list(extras.get("ref_latents") or ()), extras.get("ref_latents_method")
        check_references(self.title, x, references, method)
        tokens, ids = self.layout.pack_all(x, references, method)
        return {
            "hidden_states": tokens,
            "encoder_hidden_states": context.expand(x.shape[0], -1, -1),
            "timestep": per_item(self.title, "timestep", timestep, x.shape[0]),
            "img_ids": ids,
            "txt_ids": torch.zeros(context.shape[1], self.layout.axes, device=x.device, dtype=torch.float32),
        }

    def from_transformer(self, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """(B, tokens, width), image tokens first -> (B, C, H, W) with the height and width of x."""
        return self.layout.unpack(output, x.shape[-2], x.shape[-1])

    def output_shape(self, x_shape: tuple[int, ...], config: Mapping[str, Any]) -> tuple[int, ...]:
        """(B, out_channels / patch², H, W): the latent without the channels that Fill, Canny and Depth append."""
        return (x_shape[0], config["out_channels"] // self.layout.patch**2, *x_shape[2:])

    def sequence_length(self, x_shape: tuple[int, ...], context_shape: tuple[int, ...]) -> int:
        """Image tokens and text tokens of one forward, without reference images."""
        return math.prod(self.layout.tokens_along(side) for side in x_shape[-2:]) + context_shape[1]

    def _guidance(self, guidance: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
        # ComfyUI fills in 3.5 itself, so None means that a node took guidance away; NaN tells models/flux.py so.
        if guidance is None:
            return torch.full((x.shape[0],), math.nan, device=x.device, dtype=torch.float32)
        return per_item(self.title, "guidance", guidance.to(x.device), x.shape[0])
