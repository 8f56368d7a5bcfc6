"""How the blocks of one model come to a rank, by the kind of weights."""

from __future__ import annotations

import itertools
import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigurationError
from ..planning.coming_blocks import SLOTS, evenly, resident_blocks


@dataclass(frozen=True)
class Dealer:
    """Deals out the blocks of one model."""

    mode: str  # "dealt", their pieces are kept on the ranks' devices; "host", in the host's memory
    rank: int  # among those that keep pieces
    ranks: int
    folder: Path | None  # private to the pool; None for one rank alone
    key: Hashable  # of the weights; the same on all ranks, and on none for other weights
    device: torch.device
    resident: int = 0  # how many blocks stay whole on every rank
    held: int = 0  # how many of the others this rank keeps, too

    @property
    def on_device(self) -> bool:
        """Whether pieces are kept on GPUs, and can only go when all ranks let them: a CPU's are in shared memory."""
        return self.mode == "dealt" and self.device.type == "cuda"

    def coming(self, blocks: Sequence[Any]) -> list[Any]:
        """Of all blocks those that come, in their order."""
        stay = resident_blocks(self.resident, len(blocks))
        return [block for number, block in enumerate(blocks) if number not in stay]

    def turns(self, count: int) -> list[int | None]:
        """Of so many blocks that come, which slot each uses, in turn; None for one with a place of its own."""
        held, turn = evenly(self.held, count), itertools.count()
        return [None if block in held else next(turn) % SLOTS for block in range(count)]

    def check(self) -> None:
        """ConfigurationError, on all ranks alike, where GPUs cannot read each other's memory, or are not to."""
        if not self.on_device or self.ranks == 1:
            return
        pairs = itertools.permutations(range(torch.cuda.device_count()), 2)
        forbidden = os.environ.get("NCCL_P2P_DISABLE") == "1"
        if forbidden or not all(torch.cuda.can_device_access_peer(one, other) for one, other in pairs):
            what = "These GPUs cannot read each other's memory, so that weights cannot be spread over them."
            raise ConfigurationError(what, "Set weights to host.")
