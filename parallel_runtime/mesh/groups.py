"""Process groups by their ranks: plans whose axes join the same ranks share one, whatever the axes are called."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

GroupKey = tuple[tuple[int, ...], str]
"""Global ranks, and what the group is for where other messages between the same ranks must not come in between."""


@dataclass(frozen=True)
class ExchangedHeads:
    """One attention's heads, a multiple of the ranks of a group, as these exchange them: `lengths` are the tokens of
    each, and `device` is this rank's GPU."""

    lengths: tuple[int, ...]
    batch: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


class Groups:
    """The process groups that this rank knows of.

    Every method is collective over the world: all ranks call it with the same keys in the same order, also those that
    are in none of the groups, because torch numbers groups in the order in which they are made.

    `share` makes the memory that the ranks of a group share (HeadRoutes in exchange/head_routes.py); without it they
    share none.
    """

    def __init__(self, rank: int, world_size: int, share: Callable[[dist.ProcessGroup], Any] | None = None):
        self._rank = rank
        self._world = tuple(range(world_size))
        self._made: dict[GroupKey, dist.ProcessGroup | None] = {}
        self._share = share
        self._memory: dict[GroupKey, Any] = {}

    def join(self, key: GroupKey) -> dist.ProcessGroup | None:
        """Return the group of a key, made where it is new; None for a rank outside of it."""
        ranks, purpose = key
        if ranks == self._world and not purpose:
            return dist.group.WORLD  # there from the start, with its communicators
        if key not in self._made:
            group = dist.new_group(list(ranks))
            self._made[key] = group if self._rank in ranks else None
        return self._made[key]

    def memory(self, key: GroupKey) -> Any:
        """The memory that the ranks of a group share; None for a rank outside of it. No collective."""
        group = self.join(key)  # made before
        if group is not None and self._share is not None and key not in self._memory:
            self._memory[key] = self._share(group)
        return self._memory.get(key)

    def free_memory(self) -> None:
        """Let all shared memory go, but for what a recording still holds."""
        for memory in self._memory.values():
            memory.free()

    def keep(self, used: Collection[GroupKey]) -> None:
        """Destroy all other groups. What was recorded over one must be gone before."""
        for key in [key for key in self._made if key not in used]:
            group = self._made.pop(key)
            self._memory.pop(key, None)
            if group is not None:
                dist.destroy_process_group(group)
