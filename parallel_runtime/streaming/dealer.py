"""How the blocks of one model come to a rank, by the kind of weights."""

from __future__ import annotations

import itertools
import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from ..errors import ConfigurationError
from ..planning.coming_blocks import SLOTS, held_blocks, resident_blocks

_T = TypeVar("_T")


def reach_one_another() -> bool:
    """Whether all GPUs that this process sees can read each other's memory, as far as they are to: every rank of them
    finds the same."""
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        return False
    return all(
        torch.cuda.can_device_access_peer(index, other)
        for index, other in itertools.permutations(range(torch.cuda.device_count()), 2)
    )


@dataclass(frozen=True)
class Dealer:
    """Deals out the blocks of one model.

    Args:
        mode: "dealt", their pieces are kept on the ranks' devices; "host", in the host's memory.
        rank, ranks: among those that keep pieces.
        folder: private to the pool; None for one rank alone.
        key: of the weights; the same on all ranks, and on none for other weights.
        resident: how many blocks stay whole on every rank.
        held: how many of the others this rank keeps, too.
    """

    mode: str
    rank: int
    ranks: int
    folder: Path | None
    key: Hashable
    device: torch.device
    resident: int = 0
    held: int = 0

    @property
    def on_device(self) -> bool:
        """Whether pieces are kept on it, and can only go when all ranks let them: a CPU's are in memory that others can
        read."""
        return self.mode == "dealt" and self.device.type == "cuda"

    def coming(self, blocks: Sequence[_T]) -> list[_T]:
        """Of all blocks those that come, in their order."""
        stay = resident_blocks(self.resident, len(blocks))
        return [block for number, block in enumerate(blocks) if number not in stay]

    def turns(self, count: int) -> list[int | None]:
        """Of so many blocks that come, which slot each uses, in turn; None for one with a place of its own."""
        held, turn = held_blocks(self.held, count), itertools.count()
        return [None if block in held else next(turn) % SLOTS for block in range(count)]

    def check(self) -> None:
        """ConfigurationError, on all ranks alike, where GPUs cannot read each other's memory."""
        if self.on_device and self.ranks > 1 and not reach_one_another():
            what = "These GPUs cannot read each other's memory, so that weights cannot be spread over them."
            raise ConfigurationError(what, "Set weights to host.")
