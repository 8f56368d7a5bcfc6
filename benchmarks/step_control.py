"""A control for benchmarks: takes part in a step as the pool's ranks do, and calls back where they tell the client."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from parallel_runtime.denoising.progress import StepTelling


class StepControl:
    """Rank 0 gets every preview and tells of the steps, and all ranks agree on going on.

    Args:
        device: where the steps are computed.
        tell: called on rank 0 when it tells of a step, elsewhere when a step is launched.
    """

    def __init__(self, device: torch.device, tell: Callable[[], None]) -> None:
        self._tell = tell
        tells = not dist.is_initialized() or dist.get_rank() == 0
        self._telling = StepTelling(lambda step, total, denoised: tell(), device) if tells else None

    def progress(self, step: int, total: int, denoised: torch.Tensor | None = None) -> None:
        """See `StepTelling.step`; ranks that tell nobody wait for nothing."""
        if self._telling is None:
            self._tell()
        else:
            self._telling.step(step, total, denoised)

    def finish(self) -> None:
        """The run is over: tell of its last step."""
        if self._telling is not None:
            self._telling.flush()

    def before_compiling(self) -> None:
        pass

    def check_cancel(self) -> None:
        """Nobody cancels."""

    def loading(self, done: int, total: int) -> None:
        """Nobody waits."""

    def measuring(self) -> None:
        """Nobody waits."""

    def vote_stop(self, members: dist.ProcessGroup | None) -> Callable[[], bool]:
        """Collective where there are several ranks."""
        decision = torch.zeros(1, dtype=torch.uint8)
        work = dist.broadcast(decision, src=0, group=members, async_op=True) if members is not None else None
        return lambda: (work is None or work.wait()) and bool(decision.item())

    def all_stop(self, members: dist.ProcessGroup | None) -> bool:
        """The same at once."""
        return self.vote_stop(members)()
