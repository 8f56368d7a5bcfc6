"""What a network keeps on itself from call to call, and on what it depends here: on its weights and on contents."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..tables.blocks import Network

_MOST = 4
"""Tensors that are told apart at once: reference pictures of the CFG branches."""


class OwnCache:
    """The cache of one network, whose own code looks something up by the numbers of objects (`id`).

    These say nothing: rows of a batch are a new object at each call, with a number that another tensor may have had.
    So the network is given one object for equal contents, which lives as long as what was kept for it.

    Args:
        data: None of a network that ranks do not share out.
    """

    def __init__(self, data: Network | None):
        self._clears = data.clears if data is not None else ""
        self._by_object = data.by_object if data is not None else ()
        self._objects: list[torch.Tensor] = []

    def same_objects(self, network: nn.Module, arguments: dict[str, Any]) -> None:
        """Put the objects that the network knows in the places of equal ones."""
        for name in self._by_object:
            if (given := arguments.get(name)) is None:
                continue
            known = next((each for each in self._objects if _equal(each, given)), None)
            if known is None:
                if len(self._objects) == _MOST:
                    self.clear(network)
                known = given.clone()
                self._objects.append(known)
            arguments[name] = known

    def clear(self, network: nn.Module) -> None:
        """Have the network keep nothing."""
        if self._clears:
            getattr(network, self._clears)()
        self._objects.clear()


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
    return alike and torch.equal(one, other)
