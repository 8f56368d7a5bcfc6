"""Base of the adapters whose transformer takes tokens with position ids: those of Black Forest Labs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .call import Call
from .sides import tokens_along
from .token_layout import TokenLayout, check_references


@dataclass(frozen=True)
class TokenAdapter:
    """See `Adapter`. Latents are (B, C, H, W) in ComfyUI's scale of the family, sigma is the flow time in [0, 1].

    Every family carries reference images: `ref_latents`, a list of (1 or B, C, h, w), and `ref_latents_method`, one of
    REFERENCE_METHODS.

    Args:
        title: how artists call the family.
        extras: see `Adapter`; what the family accepts and `arguments` does not use has no effect.
        layout: how it makes tokens.
        arguments: diffusers' argument -> how it is made of the call; None leaves it out.
    """

    title: str
    extras: frozenset[str]
    layout: TokenLayout
    arguments: Mapping[str, Callable[[Call], Any]]

    def to_transformer(
        self, x: torch.Tensor, timestep: torch.Tensor, context: torch.Tensor, config: Mapping[str, Any], **extras: Any
    ) -> dict[str, Any]:
        """Arguments of the transformer's forward; see `Call` for what comes in. The transformer scales the timestep.

        Raises:
            RequestError: shapes that do not fit the model, an extra or a method that is not transportable.
        """
        call = Call(self.title, x, timestep, context, config, extras)
        call.check(self.extras)
        references, method = list(extras.get("ref_latents") or ()), extras.get("ref_latents_method")
        check_references(self.title, x, references, method)
        tokens, ids = self.layout.pack_all(x, references, method)
        made = {name: make(call) for name, make in self.arguments.items()}
        return {
            "hidden_states": tokens,
            "encoder_hidden_states": context.expand(x.shape[0], -1, -1),
            "timestep": call.per_item("timestep", timestep),
            "img_ids": ids,
            "txt_ids": torch.zeros(context.shape[1], self.layout.axes, device=x.device, dtype=torch.float32),
            **{name: value for name, value in made.items() if value is not None},
        }

    def from_transformer(self, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """(B, tokens, width), image tokens first -> (B, C, H, W) with the height and width of x."""
        return self.layout.unpack(output, x.shape[-2], x.shape[-1])

    def output_shape(self, x_shape: tuple[int, ...], config: Mapping[str, Any]) -> tuple[int, ...]:
        """(B, out_channels / patch², H, W): the latent without the channels that Fill, Canny and Depth append."""
        return (x_shape[0], config["out_channels"] // self.layout.patch**2, *x_shape[2:])

    def sequence_length(self, x_shape: tuple[int, ...], context_shape: tuple[int, ...]) -> int:
        """Image tokens and text tokens of one forward, without reference images."""
        return math.prod(tokens_along(side, self.layout.patch) for side in x_shape[-2:]) + context_shape[1]
