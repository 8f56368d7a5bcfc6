"""A stage's blocks: the others' places are taken by modules that pass on what the stage before sent, or end the
forward.

The lists keep their length, so that forwards that count their blocks (skip connections, residuals) go on as written.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import ConfigurationError
from ..said import said
from .diffusers.spec import ModelSpec, StageSpec

Streams = Mapping[str, torch.Tensor]
"""Block argument -> its tokens (batch, tokens, width): what a stage hands to the next."""


class StageDone(Exception):
    """Leaves a forward behind the last block of the stage. Not an error."""

    def __init__(self, streams: Streams):
        super().__init__("The stage is through.")
        self.streams = streams


@dataclass(frozen=True)
class Replaced:
    """A block that another module has taken the place of.

    Args:
        blocks: the list that it was in.
        name: in that list.
    """

    blocks: nn.Module
    name: str
    block: nn.Module

    @classmethod
    def by(cls, replacement: nn.Module, blocks: nn.Module, name: str) -> Replaced:
        """Put `replacement` in the place of a block."""
        replaced = cls(blocks, name, blocks.get_submodule(name))
        setattr(blocks, name, replacement)
        return replaced

    def restore(self) -> None:
        """Put the block back."""
        setattr(self.blocks, self.name, self.block)


class Relay:
    """What came from other stages for the forward at hand, what others will want, and the blocks that were taken out.

    `skips` are outputs of blocks by their index, in models whose second half takes those of the first: on a stage of
    the first half its own, on one of the second half its mirror image's.
    """

    def __init__(self, owned: tuple[int, int]) -> None:
        self.owned = owned
        self.received: Streams = {}
        self.skips: dict[int, torch.Tensor] = {}
        self._taken: list[Replaced] = []

    def replace(self, blocks: nn.Module, name: str, absent: nn.Module) -> None:
        """Put `absent` in the place of a block."""
        self._taken.append(Replaced.by(absent, blocks, name))

    def forget(self) -> None:
        """Let the blocks that were taken out go, with their memory."""
        self._taken.clear()

    def restore(self) -> None:
        """Put the blocks back, but for those that were forgotten."""
        while self._taken:
            self._taken.pop().restore()


class BeforeStage(nn.Module):
    """Stands for a block of an earlier stage: its output is what that stage sent."""

    def __init__(self, relay: Relay, stages: StageSpec, path: str, index: int):
        super().__init__()
        self._relay = relay
        self._index = index
        self._image = stages.image
        self._streams = streams_in(stages, path)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the received streams as a block returns its own.

        Where the model keeps this block's output for a skip connection, that is what it gets: the block in front of
        the stage is never one of those, so the stage itself begins with the received stream.
        """
        if self._index in self._relay.skips:
            return self._relay.skips[self._index]
        received = dict(self._relay.received)
        for stream in self._streams:
            # The stage begins where text and image are one stream, and this block still has two, to be joined.
            received.setdefault(stream, received[self._image][:, :0])
        returned = tuple(received[stream] for stream in self._streams)
        return returned[0] if len(returned) == 1 else returned


class BehindStage(nn.Module):
    """Stands for a block of a later stage: its arguments are what this stage has made of the streams."""

    def __init__(self, replaced: nn.Module, stages: StageSpec, path: str):
        super().__init__()
        self._signature = inspect.signature(replaced.forward)
        self._streams = streams_in(stages, path)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """End the forward."""
        arguments = self._signature.bind(*args, **kwargs).arguments
        raise StageDone({stream: arguments[stream] for stream in self._streams})


class Tapped(nn.Module):
    """A block of the stage whose output another stage will want too."""

    def __init__(self, block: nn.Module, relay: Relay, index: int):
        super().__init__()
        self.block = block
        self._relay = relay
        self._index = index

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the block and note its output."""
        output = self.block(*args, **kwargs)
        self._relay.skips[self._index] = output
        return output


def skips_given(blocks: int, owned: tuple[int, int]) -> tuple[int, ...]:
    """Blocks of a stage whose outputs the mirror image takes: the first half but for its last block, as diffusers'
    HunyuanDiT2DModel connects them."""
    return tuple(range(owned[0], min(owned[1], blocks // 2 - 1)))


def skips_taken(blocks: int, owned: tuple[int, int]) -> tuple[int, ...]:
    """Blocks of the mirror image whose outputs a stage takes, in the order in which they were computed."""
    return tuple(sorted(blocks - 1 - block for block in range(max(owned[0], blocks // 2 + 1), owned[1])))


def streams_in(stages: StageSpec, path: str) -> tuple[str, ...]:
    """The streams that a block takes and returns."""
    return (stages.image,) if path.rpartition(".")[0] in stages.joined else stages.streams


def stages_of(spec: ModelSpec) -> StageSpec:
    """The family's stage data.

    Raises:
        ConfigurationError: it has none.
    """
    if spec.stages is None:
        raise ConfigurationError(said("{title} cannot be cut into stages.", title=spec.title), "Set stages to 1.")
    return spec.stages


def block_paths(transformer: nn.Module, spec: ModelSpec) -> list[str]:
    """Path of every block, in forward order."""
    return [f"{path}.{index}" for path in spec.block_lists for index in range(len(transformer.get_submodule(path)))]  # type: ignore[arg-type]


def keep_blocks(transformer: nn.Module, spec: ModelSpec, owned: tuple[int, int]) -> Relay:
    """Take out all blocks but those from owned[0] up to owned[1].

    Raises:
        ConfigurationError: the family has no stage data.
    """
    stages = stages_of(spec)
    relay = Relay(owned)
    for index, path in enumerate(block_paths(transformer, spec)):
        parent, _, name = path.rpartition(".")
        blocks = transformer.get_submodule(parent)
        if index < owned[0]:
            relay.replace(blocks, name, BeforeStage(relay, stages, path, index))
        elif index >= owned[1]:
            relay.replace(blocks, name, BehindStage(blocks.get_submodule(name), stages, path))
    return relay


def is_absent(block: nn.Module) -> bool:
    """Whether another stage has this block."""
    return isinstance(block, BeforeStage | BehindStage)
