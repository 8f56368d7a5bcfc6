"""What the engine asks of a model's family before it runs a request: two sources of networks answer it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..errors import RequestError
from ..networks.diffusers.call import TAKE_COMFYUIS
from ..networks.diffusers.spec import ModelSpec
from ..networks.facts import describe_request
from ..networks.tables.diffusers import cut_of
from ..requests.conditioning import Conditioning, hollow
from ..requests.facts import RequestFacts, Seen
from ..said import said


class Family(Protocol):
    """A family with the configuration of one file."""

    @property
    def name(self) -> str:
        """Key of the family, for the client."""
        ...

    @property
    def token(self) -> int:
        """Latent positions along one side of a token."""
        ...

    def check(self, conditioning: Conditioning, x: torch.Tensor) -> Seen:
        """Refuse what the network cannot take, from shapes alone; return these.

        Args:
            x: that it will see, (B, C, ...), on the meta device.

        Raises:
            RequestError: with what does not fit.
        """
        ...

    def describe(self, seen: Seen, *, batch: int, steps: int = 0) -> RequestFacts:
        """A request's facts; see `describe_request` for the arguments."""
        ...


@dataclass(frozen=True)
class DiffusersFamily:
    """A family of diffusers' classes.

    Args:
        config: diffusers config of the file.
    """

    spec: ModelSpec
    config: dict[str, Any]

    @property
    def name(self) -> str:
        """Registry name."""
        return self.spec.name

    @property
    def token(self) -> int:
        """Latent positions along one side of a token."""
        return self.spec.token

    def check(self, conditioning: Conditioning, x: torch.Tensor) -> Seen:
        """Refuse what the adapter makes no arguments of, and arguments of other widths than the file's.

        Raises:
            RequestError: with what does not fit.
        """
        check_arguments(conditioning, self.spec, self.config, x.shape[0])
        shapes = conditioning.hollow()
        timestep = torch.zeros(x.shape[0])
        arguments = self.spec.adapter.to_transformer(hollow(x), timestep, shapes.context, self.config, **shapes.extras)
        self.spec.check_widths(arguments, self.config)
        return Seen(tuple(conditioning.context.shape), (tuple(x.shape),))

    def describe(self, seen: Seen, *, batch: int, steps: int = 0) -> RequestFacts:
        """A request's facts. A text that the blocks take by cross-attention is none of their tokens."""
        joined = any(len(blocks.tokens) > 1 for blocks in cut_of(self.spec.transformer_class))
        patch, text = (self.token, self.token), seen.text[1] if joined else 0
        return describe_request([shape[2:] for shape in seen.latents], patch, text, batch, steps)


def check_arguments(conditioning: Conditioning, spec: ModelSpec, config: Mapping[str, Any], batch: int) -> None:
    """Refuse what the model's adapter cannot carry, and what this checkpoint has nothing to do with.

    Raises:
        RequestError: no context, a batch that differs from x, or an argument, by name, that is not known or that needs
            a part which the checkpoint lacks.
    """
    context = conditioning.arguments.get("context")
    if not isinstance(context, torch.Tensor) or context.ndim != 3:
        raise RequestError(
            said("{title} needs text conditioning of three dimensions.", title=spec.title),
            "Connect the text encoder that belongs to the model.",
        )
    conditioning.check_rows(batch)
    given = {name for name, value in conditioning.extras.items() if value is not None}
    if unknown := sorted(given - spec.adapter.extras):
        raise RequestError(
            said(
                "The diffusers network of {title} cannot carry {unknown}.", title=spec.title, unknown=", ".join(unknown)
            ),
            TAKE_COMFYUIS,
        )
    for name, part in spec.needs.items():
        if name in given and config.get(part.key) is None:
            raise RequestError(
                said(
                    "The conditioning holds {name}, and this {title} checkpoint has no {title2} to take it in.",
                    name=name,
                    title=spec.title,
                    title2=part.title,
                ),
                "Disconnect what adds it, or choose a checkpoint made for it.",
            )
