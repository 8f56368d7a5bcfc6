"""Conditionings that the client sent once and refers to by number afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import RequestError
from ..networks.diffusers.spec import ModelSpec
from .requests import ConditioningRef, tensor_name


@dataclass(frozen=True)
class Conditioning:
    """Keyword arguments of ComfyUI's transformer call, without x and timestep. `context` is (B, T, D)."""

    arguments: Mapping[str, Any]

    @property
    def context(self) -> torch.Tensor:
        """Text tokens (B, T, D)."""
        return self.arguments["context"]

    @property
    def extras(self) -> dict[str, Any]:
        """All but the context."""
        return {name: value for name, value in self.arguments.items() if name != "context"}

    def on_meta(self) -> Conditioning:
        """The same without data: shapes and plain values."""
        return Conditioning({name: _to_meta(value) for name, value in self.arguments.items()})


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    return [_to_meta(item) for item in value] if isinstance(value, list) else value


def assemble(reference: ConditioningRef, tensors: Mapping[str, torch.Tensor]) -> Conditioning:
    """Gather a new conditioning's arguments from a request's tensors (or from their meta twins)."""
    arguments: dict[str, Any] = dict(reference.constants)
    for key in reference.tensors:
        arguments[key] = tensors[tensor_name(reference.id, key)]
    for key, length in reference.lists.items():
        arguments[key] = [tensors[tensor_name(reference.id, key, i)] for i in range(length)]
    return Conditioning(arguments)


class ConditioningStore:
    """This rank's conditionings by number. The client decides what is kept, so that all ranks keep the same."""

    def __init__(self) -> None:
        self._kept: dict[int, Conditioning] = {}

    def peek(self, reference: ConditioningRef, meta: Mapping[str, torch.Tensor]) -> Conditioning:
        """The conditioning as far as PREPARE can know it: shapes for a new one, the real one otherwise.

        Raises:
            RequestError: it is neither new nor kept, or its tensors did not come along.
        """
        if not reference.new and reference.id not in self._kept:
            raise RequestError(f"Conditioning {reference.id} is not known to the pool.", "Queue the prompt again.")
        try:
            return assemble(reference, meta) if reference.new else self._kept[reference.id]
        except KeyError as error:
            raise RequestError(f"Conditioning tensor {error} did not come with the request.", "Report this.") from error

    def take(self, reference: ConditioningRef, tensors: Mapping[str, torch.Tensor]) -> Conditioning:
        """The conditioning itself; a new one is kept for later requests."""
        if reference.new:
            self._kept[reference.id] = assemble(reference, tensors)
        return self._kept[reference.id]

    def drop(self, numbers: Iterable[int]) -> None:
        """Forget conditionings that the client will not name again."""
        for number in numbers:
            self._kept.pop(number, None)

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()


def check_arguments(conditioning: Conditioning, spec: ModelSpec, config: Mapping[str, Any], batch: int) -> None:
    """Refuse what the model's adapter cannot carry, and what this checkpoint has nothing to do with.

    Raises:
        RequestError: no context, a batch that differs from x, or an argument, by name, that is not known or that needs
            a part which the checkpoint lacks.
    """
    context = conditioning.arguments.get("context")
    if not isinstance(context, torch.Tensor) or context.ndim != 3:
        raise RequestError(
            f"{spec.title} needs text conditioning of three dimensions.",
            "Connect the text encoder that belongs to the model.",
        )
    if context.shape[0] not in (1, batch):
        raise RequestError(
            f"The conditioning holds {context.shape[0]} items, but the latent batch holds {batch}.",
            "Use one prompt, or as many as latents.",
        )
    given = {name for name, value in conditioning.extras.items() if value is not None}
    if unknown := sorted(given - spec.adapter.extras):
        raise RequestError(
            f"{spec.title} in the pool cannot carry {', '.join(unknown)}.",
            "Remove the node that adds it, or load the model with Load Diffusion Model.",
        )
    for name, part in spec.needs.items():
        if name in given and config.get(part.key) is None:
            raise RequestError(
                f"The conditioning holds {name}, and this {spec.title} checkpoint has no {part.title} to take it in.",
                "Disconnect what adds it, or choose a checkpoint made for it.",
            )
