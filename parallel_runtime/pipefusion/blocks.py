"""A stage's blocks: the others' places are taken by modules that pass on what the stage before sent, or end the
forward.

The lists keep their length, so that forwards that count their blocks (skip connections, residuals) go on as written.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..errors import ConfigurationError
from ..models.spec import ModelSpec, StageSpec

Streams = Mapping[str, torch.Tensor]
"""Block argument -> its tokens (batch, tokens, width): what a stage hands to the next."""


class StageDone(Exception):
    """Leaves a forward behind the last block of the stage. Not an error."""

    def __init__(self, streams: Streams):
        super().__init__("The stage is through.")
        self.streams = streams


class Relay:
    """What came from the stage before, for the forward at hand."""

    def __init__(self) -> None:
        self.received: Streams = {}


class BeforeStage(nn.Module):
    """Stands for a block of an earlier stage: its output is what that stage sent."""

    def __init__(self, relay: Relay, streams: tuple[str, ...]):
        super().__init__()
        self._relay = relay
        self._streams = streams

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the received streams as a block returns its own."""
        returned = tuple(self._relay.received[stream] for stream in self._streams)
        return returned[0] if len(returned) == 1 else returned


class BehindStage(nn.Module):
    """Stands for a block of a later stage: its arguments are what this stage has made of the streams."""

    def __init__(self, replaced: nn.Module, streams: tuple[str, ...]):
        super().__init__()
        self._signature = inspect.signature(replaced.forward)
        self._streams = streams

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """End the forward."""
        arguments = self._signature.bind(*args, **kwargs).arguments
        raise StageDone({stream: arguments[stream] for stream in self._streams})


def stages_of(spec: ModelSpec) -> StageSpec:
    """The family's stage data.

    Raises:
        ConfigurationError: it has none.
    """
    if spec.stages is None:
        raise ConfigurationError(f"{spec.title} cannot be cut into stages.", "Set stages to 1.")
    return spec.stages


def block_paths(transformer: nn.Module, spec: ModelSpec) -> list[str]:
    """Path of every block, in forward order."""
    return [f"{path}.{index}" for path in spec.block_lists for index in range(len(transformer.get_submodule(path)))]  # type: ignore[arg-type]


def keep_blocks(transformer: nn.Module, spec: ModelSpec, owned: tuple[int, int], relay: Relay) -> None:
    """Drop all blocks but those from owned[0] up to owned[1]; their memory, if they have any, goes with them."""
    streams = stages_of(spec).streams
    for index, path in enumerate(block_paths(transformer, spec)):
        parent, _, name = path.rpartition(".")
        blocks = transformer.get_submodule(parent)
        if index < owned[0]:
            setattr(blocks, name, BeforeStage(relay, streams))
        elif index >= owned[1]:
            setattr(blocks, name, BehindStage(blocks.get_submodule(name), streams))


def is_absent(block: nn.Module) -> bool:
    """Whether another stage has this block."""
    return isinstance(block, BeforeStage | BehindStage)
