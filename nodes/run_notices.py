"""What the node that samples says: what it waits for, and what a run was, which is kept. No ComfyUI needed."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

from parallel_runtime.said import NOTHING, Said, said, together

from .panel.run_history import HISTORY, RunHistory, RunRecord, Span
from .transportable import listed

if TYPE_CHECKING:
    from parallel_runtime.requests.requests import Finished, PlanDetails
    from workers.client.client import PoolClient
    from workers.client.life import Wait

_WORDS = {
    "turn": "Waiting for another prompt's turn on these GPUs ({seconds} s).",
    "cancelled": "Waiting for the cancelled prompt's last step to end ({seconds} s).",
    "pause": "Processes ended several times in a row: a pause before they start again ({seconds} s).",
    "start": "Starting: {done} of {total} devices are ready ({seconds} s).",
    "weights": "Loading: {done} of {total} GB.",
    "measuring": "Measuring kernels and links, once for this machine ({seconds} s).",
    "compile": "Compiling {model}, once per machine: {seconds} s.",
    "load": "Preparing the model ({seconds} s).",
    "step": "Computing ({seconds} s).",
}
"""By a reason of `Wait`, or what the ranks do otherwise."""
OPENING = Said("Opening the model file.")
QUIET_SECONDS = 0.4  # work that is over sooner needs no words
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
    """What is said of a model's requests and runs: `show` puts a text on the running node, `move_bar` its bar to (done,
    total) bytes; `where` tells the prompt and the node."""

    def __init__(
        self, show: Callable[[Said], None], clock: Callable[[], float] = time.monotonic, *, model: str = "",
        where: Callable[[], tuple[str, str]] = lambda: ("", ""),
        move_bar: Callable[[int, int], None] = lambda done, total: None, history: RunHistory = HISTORY,
    ):  # fmt: skip
        self._show, self._move_bar, self._where, self._clock = show, move_bar, where, clock
        self.model = model
        self._history = history
        self._epoch = time.time() - time.monotonic()
        self._doing = self._reason = self._shown = ""
        self._since = 0.0
        self._outdated = False  # what is shown is of a wait, and would be wrong of the work after it
        self.begin()
        self.obstacles: tuple[Said, ...] = ()  # why this run's loop goes step by step; empty where the pool runs it

    def watching(self, pool: PoolClient, should_cancel: Callable[[], bool], doing: str = "step") -> Callable[[], bool]:
        """`should_cancel` of a request to "load" or "step", asked many times a second, which tells the node as well."""
        self._doing, self._reason, self._since = doing, doing, self._clock()

        def ask() -> bool:
            self._about(pool.keeper.waits_for)
            return should_cancel()

        return ask

    def _about(self, wait: Wait) -> None:
        reason, now = self._doing if wait.reason == "job" else wait.reason, self._clock()
        if reason != self._reason:
            self._close(now)
            self._reason, self._since = reason, now
        seconds = now - self._since
        works = reason == self._doing
        if works and seconds < QUIET_SECONDS and not self._outdated:
            return
        done, total = (round(each / 1e9, 1) if reason == "weights" else each for each in (wait.done, wait.total))
        text = said(_WORDS[reason], done=done, total=total, seconds=int(seconds), model=self.model)
        if text != self._shown:
            self.tell(text)
            if reason == "weights":
                self._move_bar(wait.done, max(wait.total, 1))
        self._outdated = not works

    def tell(self, text: Said) -> None:
        """Show a text, whatever it is about."""
        self._shown, self._outdated = text, False
        self._show(text)

    def end(self) -> None:
        """The request is through, or a step of it; what follows is the next one."""
        now = self._clock()
        self._close(now)
        self._reason, self._since = self._doing, now

    def _close(self, now: float) -> None:
        if self._reason:
            prompt, node = self._where()
            self._history.span(prompt, Span(self._reason, node, self._epoch + self._since, self._epoch + now))

    def begin(self) -> None:
        """A run begins."""
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
        """A run is over: keep what it was, and return that in sentences; "" where nothing ran or it was not whole."""
        if not whole:
            self.begin()
            self.tell(STOPPED)
        if self._last is None:
            return NOTHING
        ran, details, latent, steps, how = self._last
        kind = self.model, latent, how, len(self._times) // (steps or 1)
        record = RunRecord(
            model=self.model,
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

    def computed_before(self, moments: Sequence[float]) -> None:
        """A run's steps were done at these moments, before its request was through."""
        self._times += moments
        self.end()

    def computed(self) -> None:
        self._times.append(self._clock())
        self.end()
