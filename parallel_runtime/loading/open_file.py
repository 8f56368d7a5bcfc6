"""A model's file that is about to be read, and who reads it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ..errors import NotLoadedError
from ..networks.stages import all_blocks, let_go
from ..networks.tables.blocks import Blocks
from .files import Identity, identity
from .reading import OnBytes, Place


@dataclass(frozen=True)
class OpenFile:
    """A file that is about to be read; holds whatever that needs.

    Args:
        network: its weights have their shapes and types, and no numbers.
        find: (a weight's name, which of its parts (weight_parts.py)) -> where the file has it as it is, else its
            numbers, on the host.
    """

    network: nn.Module
    find: Callable[[str, int], Place | torch.Tensor]


class Reader(ABC):
    """Who reads a model's file.

    Args:
        stamp: of the file when it was recognised.
        lists: blocks in the order in which they run; () where the network's are not known.
        owned: (start, stop) of the blocks that this rank has, of a network in stages; None for all.
    """

    def __init__(
        self, path: str | Path, stamp: Identity, lists: Sequence[Blocks] = (), owned: tuple[int, int] | None = None
    ):
        self.owned = owned
        self._path = path
        self._stamp = stamp
        self._lists = lists

    def open(self, on_bytes: OnBytes) -> OpenFile:
        """Begin; what is asked for is read later.

        Raises:
            NotLoadedError: the file was replaced since.
            CheckpointError, UnsupportedModelError: it cannot be read.
        """
        if identity(self._path) != self._stamp:
            raise NotLoadedError("{path} was replaced since it was loaded.", "Queue the prompt again.", path=self._path)
        return self.begin(on_bytes)

    @abstractmethod
    def begin(self, on_bytes: OnBytes) -> OpenFile:
        """Build the network of the file, which is what it was when it was recognised."""

    def let_others_go(self, network: nn.Module) -> None:
        """Let the blocks of other stages go."""
        if self.owned is not None and self._lists:
            found = all_blocks(network, self._lists)
            let_go([*found[: self.owned[0]], *found[self.owned[1] :]])

    def blocks(self, network: nn.Module) -> Sequence[str]:
        """Paths of all blocks, in forward order."""
        paths = [blocks.path for blocks in self._lists]
        return [f"{path}.{name}" for path in paths for name, _ in network.get_submodule(path).named_children()]
