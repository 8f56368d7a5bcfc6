"""What the engine tells and asks while it works: progress outwards, cancel inwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from ..errors import ParallelError

if TYPE_CHECKING:  # ComfyUI's process reads this file, and needs no torch.distributed
    import torch.distributed as dist


class Cancelled(ParallelError):
    """The artist stopped the prompt. Not a failure: the pool stays as it is."""

    def __init__(self) -> None:
        super().__init__("The job was cancelled.", "")


class Control(Protocol):
    """Handed to `Engine.prepare` and `Prepared.run`; the rank process implements it."""

    def progress(self, step: int, total: int, denoised: torch.Tensor | None = None) -> None:
        """A step is launched, and may be under way still; `denoised` (B, C, ...) float32 is the preview where one was
        asked for. What this waits for, on the rank that tells the client, keeps the host from running ahead."""

    def before_compiling(self) -> None:
        """The forwards that come may compile, which can take minutes."""

    def check_cancel(self) -> None:
        """Raise `Cancelled` if this rank has heard of a cancel. For PREPARE, where ranks need not agree."""

    def loading(self, done: int, total: int) -> None:
        """So many bytes of weights are on the device; several times a second. Raises as `check_cancel`."""
        self.check_cancel()

    def measuring(self) -> None:
        """Kernels or links are about to be timed, which takes seconds; told again and again, it costs nothing."""

    def all_stop(self, members: dist.ProcessGroup | None) -> bool:
        """Collective: whether all ranks of a plan stop before the next step. For RUN, where they must agree. `members`
        are all of them, the pool's first among them; None where it is alone. Ranks outside do not vote: where all that
        compute fail alike, nobody waits for them."""
        return self.vote_stop(members)()

    def vote_stop(self, members: dist.ProcessGroup | None) -> Callable[[], bool]:
        """Begin the same without waiting for the other ranks; what is returned waits, and tells. All ranks call both
        in the same order."""


class StopVotes:
    """A cancel, agreed on without waiting, which would empty a pipeline, or let GPUs wait for their hosts: what the
    `members` of a plan, all of its ranks, voted at one step holds from the next on, for all of them."""

    def __init__(self, control: Control, members: dist.ProcessGroup | None):
        self._control, self._members = control, members
        self._open: Callable[[], bool] | None = None

    def stop(self) -> bool:
        """Vote, and return the result of the vote before."""
        before, self._open = self._open, self._control.vote_stop(self._members)
        return before is not None and before()

    def close(self) -> None:
        """Wait for the last vote: no collective may be left open."""
        if self._open is not None:
            self._open()
            self._open = None
