"""Kinds of calls, and what the ranks of a group have recorded of each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ..mesh.agreement import NONE, all_agree
from ..mesh.mesh import Mesh
from .cuda_graphs import Replay
from .host_tensors import HostTensors


class OtherWay(Protocol):
    """In which the same forwards can go, once all ranks are seen to go alike."""

    def seen(self) -> int:
        """Of the last forward: a number that another rank has, too, if that did alike; NONE: it has no other way."""

    def taken(self) -> AbstractContextManager[None]:
        """Inside, forwards go it."""

    def state(self) -> int:
        """A number that changes where this rank does otherwise than before, whatever kind it sees it in."""


@dataclass
class Kind:
    """A kind of call: how often it was run, whether the ranks have recorded it, and this rank's recording if it still
    has it, which reads what `host` keeps. `mesh` is held so that its id stays taken. `reads` says that a replay may be
    no result, on any rank, and `failed` how often one was none. `memory` is which of the group's shared memories it was
    recorded with. `was_long` tells of the last warm run, see `timed`, and so does `seen`, by which the ranks agreed
    whether this kind goes the `other_way`."""

    mesh: Mesh
    device: torch.device
    runs: int = 0
    recorded: bool = False
    replay: Replay | None = None
    host: HostTensors | None = None
    reads: bool = False
    failed: int = 0
    memory: int = 0
    was_long: Callable[[], bool] = lambda: False
    seen: int = NONE
    other_way: bool = False

    def agree(self, agreed: bool) -> bool:
        """Whether all ranks that run it agree."""
        return all_agree(agreed, self.mesh.sequence, self.device)

    def begin_anew(self, runs: int) -> None:
        """As after so many runs; on all ranks alike."""
        self.replay, self.host, self.recorded, self.runs = None, None, False, runs


@dataclass
class Recordings:
    """What the calls over one sequence group have left here. Its ranks have the same under the same number."""

    history: int = NONE
    enabled: bool = True
    state: int = NONE  # of `OtherWay`, where all ranks have the same
    kinds: dict[tuple[Any, ...], Kind] = field(default_factory=dict)  # the one that ran last comes last

    def lose(self) -> None:
        """Let the recordings of this rank go, but not what the ranks know alike."""
        self.history = NONE
        for kind in self.kinds.values():
            kind.replay = kind.host = None
