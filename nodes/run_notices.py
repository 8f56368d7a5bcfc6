"""What the node that samples says of a run, and what of it is kept. No ComfyUI needed."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

from parallel_runtime.said import NOTHING, Said, said, together

from .panel.run_history import HISTORY, RunHistory, RunRecord, Span
from .transportable import listed
from .wait_notices import WaitNotices

if TYPE_CHECKING:
    from parallel_runtime.requests.answers import Finished, PlanDetails

IN_TURN = Said("Step by step, the stages run one after the other: exact, but slower than one GPU.")
STOPPED = Said("Stopped before the end.")
_BY_ITSELF = Said("a node that samples by itself")


def describe_run(run: RunRecord) -> Said:
    """What a step took and how that compares, which a badge has room for; the latent, and the plan that ran."""
    from parallel_runtime.planning.explanation import show_seconds

    seconds, alone = run.step_seconds, run.one_gpu_seconds
    sentences: list[Said] = []
    if seconds is not None:
        sentences.append(said("{seconds} per step.", seconds=show_seconds(seconds)))
    if run.speedup is not None and alone is not None:
        template = "{times} times as fast as one device, which took {alone}."
        sentences.append(said(template, times=f"{run.speedup:.2f}", alone=show_seconds(alone)))
    latent = said("Latent {shape}.", shape=" × ".join(map(str, run.latent[2:])))
    return together([*sentences, latent, run.plan])


class RunNotices:
    """The notices of one model's runs; `model` is its file's name. `show` puts a text on the node that is running, and
    `move_bar` its progress bar to (done, total); `where` tells the prompt and the node."""

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
        self.begin()
        self.obstacles: tuple[Said, ...] = ()
        """Why this run's loop goes step by step; empty where the pool runs it."""

    def begin(self) -> None:
        self.obstacles = (_BY_ITSELF,)
        self._last: tuple[Finished, PlanDetails | None, tuple[int, ...], int, Hashable] | None = None
        self._times: list[float] = []

    def loop(self, obstacles: Sequence[Said]) -> None:
        """A sampler is at work, in the pool or step by step."""
        self.obstacles = tuple(dict.fromkeys(obstacles))

    def why_by_steps(self, stages: int) -> Said:
        """Why the loop went step by step, a sentence or two for weights in so many stages; "" where the pool ran it."""
        if not self.obstacles:
            return NOTHING
        what = listed(self.obstacles)
        text = said("Sampled step by step, because the loop on these devices does not know {what}.", what=what)
        return text if stages == 1 else together((text, IN_TURN))

    def ran(
        self, ran: Finished, details: PlanDetails | None, latent: Sequence[int], steps: int, how: Hashable = None
    ) -> None:
        """A call or a loop has run by a plan of these details, on x of the shape `latent`, in a run of so many steps, 0
        where that is not known; `how` is what else its time depends on."""
        self._last = ran, details, tuple(latent), steps, how

    def finish(self, whole: bool = True) -> Said:
        """A run is over: keep what it was, and return that in sentences; "" where nothing ran, or it did not come to
        its end: then nobody knows how many steps ran, and so what one took."""
        if not whole:
            self.begin()
            self.waits.tell(STOPPED)
        if self._last is None:
            return NOTHING
        ran, details, latent, steps, how = self._last
        kind = self._model, latent, how, len(self._times) // (steps or 1)
        record = RunRecord(
            model=self._model,
            node=self._where()[1],
            plan=ran.plan,
            latent=latent,
            steps=steps,
            step_seconds=self._step_seconds(steps),
            one_gpu_seconds=self._history.one_rank_seconds(kind),
            details=details,
            ended=time.time(),
            obstacles=self.obstacles,
        )
        self._history.ran(kind, record)
        return describe_run(record)

    def _step_seconds(self, steps: int) -> float | None:
        """The first call left out, which may have compiled; None where there was no other."""
        calls = len(self._times)
        if calls < 2:
            return None
        seconds = (self._times[-1] - self._times[0]) / (calls - 1)
        return seconds * calls / (steps or calls)

    def computed(self) -> None:
        self._times.append(self._clock())
        self.waits.end()

    def _note(self, what: str, begin: float, end: float) -> None:
        prompt, node = self._where()
        self._history.span(prompt, Span(what, node, self._epoch + begin, self._epoch + end))
