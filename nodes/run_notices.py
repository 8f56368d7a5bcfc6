"""What the node that samples says meanwhile: that the ranks compile, that stages run in turn. No ComfyUI needed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

from parallel_runtime.said import NOTHING, Said, said, together

from .panel.run_history import HISTORY, RunHistory, RunRecord, Span, is_one_rank
from .transportable import listed
from .wait_notices import WaitNotices

if TYPE_CHECKING:
    from parallel_runtime.requests.plan_details import PlanDetails
    from parallel_runtime.requests.requests import Finished

log = logging.getLogger("parallel_dit")

IN_TURN = Said("Step by step, the stages run one after the other: exact, but slower than one GPU.")
STOPPED = Said("Stopped before the end.")
_IN_POOL = Said("Sampled on these devices.")
_BY_ITSELF = Said("a node that samples by itself")


def describe_loop(obstacles: Sequence[Said], stages: int = 1) -> Said:
    """Where a loop ran, a sentence or two.

    Args:
        obstacles: why it went step by step.
        stages: that the weights are split into.
    """
    if not obstacles:
        return _IN_POOL
    what = listed(obstacles)
    text = said("Sampled step by step, because the loop on these devices does not know {what}.", what=what)
    return text if stages == 1 else together((text, IN_TURN))


class RunNotices:
    """The notices of one model's runs.

    Args:
        show: puts a text on the node that is running.
        clock: seconds.
        model: its file's name.
        where: prompt and node that are running.
        move_bar: (done, total) of the running node's progress bar.
        history: keeps what ran.
    """

    def __init__(
        self,
        show: Callable[[Said], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        model: str = "",
        where: Callable[[], tuple[str, str]] = lambda: ("", ""),
        move_bar: Callable[[int, int], None] = lambda done, total: None,
        history: RunHistory = HISTORY,
    ):
        self._clock = clock
        self._model = model
        self._where = where
        self._history = history
        self._epoch = time.time() - time.monotonic()
        self.waits = WaitNotices(show, move_bar, self._note, clock, model)
        self.obstacles: tuple[Said, ...] = ()
        """Why this run's loop goes step by step; empty where the pool runs it."""
        self._told_of_stages = False

        self._ran: Finished | None = None
        self._details: PlanDetails | None = None
        self._how: Hashable = None
        self._steps = 0
        self._latent: tuple[int, ...] = ()
        self._times: list[float] = []

    def begin(self) -> None:
        """A sampling run begins."""
        self._ran, self._times = None, []
        self.obstacles = (_BY_ITSELF,)
        self._told_of_stages = False

    def loop(self, obstacles: Sequence[Said]) -> None:
        """A sampler is at work, in the pool or step by step."""
        self.obstacles = tuple(dict.fromkeys(obstacles))

    def ran(
        self, ran: Finished, details: PlanDetails | None, latent: Sequence[int], steps: int, how: Hashable = None
    ) -> None:
        """A call or a loop has run.

        Args:
            details: of its plan.
            latent: shape of x.
            steps: of the whole run; 0 where that is not known.
            how: what else a run's time depends on, but for its plan.
        """
        self._ran, self._details, self._how = ran, details, how
        self._latent, self._steps = tuple(latent), steps

    def finish(self, whole: bool = True) -> Said:
        """A run is over: keep what it was, and return its `summary`; "" where nothing ran.

        Args:
            whole: it came to its end. Of one that did not, nobody knows how many steps ran, and so what one took.
        """
        if not whole:
            self.begin()
            self.waits.tell(STOPPED)
        if self._ran is not None:
            record = RunRecord(
                model=self._model,
                node=self._where()[1],
                plan=self._ran.plan,
                latent=self._latent,
                steps=self._steps,
                step_seconds=self.step_seconds,
                one_gpu_seconds=self._history.one_rank_seconds(self._kind),
                details=self._details,
                ended=time.time(),
                obstacles=self.obstacles,
            )
            self._history.ran(self._kind, record)
        return self.summary()

    @property
    def _kind(self) -> Hashable:
        """Equal for runs whose times can be compared."""
        return self._model, self._latent, self._how, len(self._times) // (self._steps or 1)

    @property
    def step_seconds(self) -> float | None:
        """Of this run, the first step left out, which may have compiled; None where there was no other."""
        calls = len(self._times)
        if calls < 2:
            return None
        seconds = (self._times[-1] - self._times[0]) / (calls - 1)
        return seconds * calls / (self._steps or calls)

    def summary(self) -> Said:
        """The plan that ran, for the latent that it ran on, what a step took, and how that compares; "" where nothing
        ran."""
        if self._ran is None:
            return NOTHING
        from parallel_runtime.planning.explanation import show_seconds

        shape = " × ".join(map(str, self._latent[2:]))
        sentences: list[str] = [said("Latent {shape}.", shape=shape), self._ran.plan]
        if self._details is not None and self._details.used_bytes:
            sizes = {"predicted": self._details.memory_bytes, "used": self._details.used_bytes}
            gib = {name: f"{size / 2**30:.1f}" for name, size in sizes.items()}
            sentences.append(said("Memory per GPU: predicted {predicted} GiB, used {used} GiB.", **gib))
        seconds = self.step_seconds
        if seconds is not None:
            sentences.append(said("{seconds} per step.", seconds=show_seconds(seconds)))
            alone = self._history.one_rank_seconds(self._kind)
            if alone is not None and not is_one_rank(self._details):
                sentences.append(
                    said(
                        "{times} times as fast as one device, which took {alone}.",
                        times=f"{alone / seconds:.2f}",
                        alone=show_seconds(alone),
                    )
                )
        return together(sentences)

    def computed(self) -> None:
        """A step is through: whatever was compiled for it is ready."""
        self._times.append(self._clock())
        waited = self.waits.end()
        if "weights" in waited:
            self._tell(said("Loaded."), logging.INFO)
        if "compile" in waited:
            self._tell(said("Compiled in {seconds} s.", seconds=round(waited["compile"])), logging.INFO)

    def in_turn(self) -> None:
        """A step ran through the stages one after the other; told once a run."""
        if not self._told_of_stages:
            self._told_of_stages = True
            self._tell(IN_TURN, logging.WARNING)

    def _note(self, what: str, begin: float, end: float) -> None:
        prompt, node = self._where()
        self._history.span(prompt, Span(what, node, self._epoch + begin, self._epoch + end))

    def _tell(self, text: Said, level: int) -> None:
        log.log(level, "Parallel DiT: %s", text)
        self.waits.tell(text)
