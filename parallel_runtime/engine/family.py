"""What the engine asks of a model's family before it runs a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..errors import RequestError
from ..networks.diffusers.spec import ModelSpec
from ..networks.facts import describe_request
from ..networks.tables.blocks import LATENT_SHAPES
from ..requests.conditioning import Conditioning, hollow
from ..requests.facts import RequestFacts, Seen
from ..requests.trees import map_tensors


@dataclass
class Family:
    """A family of ComfyUI's networks, which check their arguments themselves."""

    title: str  # how artists call it
    patch: tuple[int, ...]  # latent positions that a token takes, by the last dims of the latent
    rows_together: bool = False  # every rank computes all rows of a batch, so that there is one to plan for
    joins_text: bool = True  # the text's tokens run through the blocks, too

    def check(self, conditioning: Conditioning, x: torch.Tensor) -> Seen:
        """Refuse what the network cannot take, from shapes alone, and return these: RequestError for a text of another
        batch. `x` is what it will see, (B, C, ...), on the meta device."""
        context = conditioning.arguments.get("context")
        shapes = conditioning.arguments.get(LATENT_SHAPES)
        latents = (tuple(x.shape),) if shapes is None else tuple(tuple(shape) for shape in shapes)
        if not isinstance(context, torch.Tensor) or context.ndim < 2:
            return Seen((x.shape[0], 0, 0), latents)
        conditioning.check_rows(x.shape[0])
        return Seen((context.shape[0], context.shape[1], context.shape[-1]), latents)

    def describe(self, seen: Seen, *, batch: int, steps: int = 0) -> RequestFacts:
        """A request's facts; see `describe_request` for the arguments."""
        latents, text = [shape[2:] for shape in seen.latents], seen.text[1] if self.joins_text else 0
        return describe_request(latents, self.patch, text, 1 if self.rows_together else batch, steps)


class DiffusersFamily(Family):
    """A family of diffusers' classes, for the diffusers config of a file."""

    def __init__(self, spec: ModelSpec, config: dict[str, Any]):
        # A text that the blocks take by cross-attention is none of their tokens.
        joined = any(len(blocks.tokens) > 1 for blocks in spec.cut)
        super().__init__(spec.title, (spec.token, spec.token), joins_text=joined)
        self._spec = spec
        self._config = config

    def check(self, conditioning: Conditioning, x: torch.Tensor) -> Seen:
        """RequestError for what the spec makes no arguments of, and arguments of other widths than the file's."""
        spec = self._spec
        context = conditioning.arguments.get("context")
        if not isinstance(context, torch.Tensor) or context.ndim != 3:
            what = "{title} needs text conditioning of three dimensions."
            raise RequestError(what, "Connect the text encoder that belongs to the model.", title=spec.title)
        conditioning.check_rows(x.shape[0])
        shapes, timestep = map_tensors(dict(conditioning.arguments), hollow), torch.zeros(x.shape[0])
        spec.check_widths(spec.to_transformer(hollow(x), timestep, config=self._config, **shapes), self._config)
        return Seen(tuple(context.shape), (tuple(x.shape),))
