"""What the node that samples says: what it waits for, with its bar while weights are read, and what a run was, which is
kept. No ComfyUI needed."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parallel_runtime.said import NOTHING, Said, said, together

from .panel.run_history import HISTORY, RunHistory, RunRecord, Span
from .transportable import listed

if TYPE_CHECKING:
    from parallel_runtime.requests.answers import Finished, PlanDetails
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

QUIET_SECONDS = 0.4
"""Work that is over sooner needs no words."""

IN_TURN = Said("Step by step, the stages run one after the other: exact, but slower than one GPU.")
STOPPED = Said("Stopped before the end.")
_BY_ITSELF = Said("a node that samples by itself")


@dataclass
class WaitNotices:
    """One request after the other, of a model by its file's name; told many times a second what each waits for. `show`
    puts a text on the node that is running, `move_bar` its progress bar to (done, total) bytes, and `note` gets (what,
    begin, end) of a part that is over, by `clock`, in seconds."""

    show: Callable[[Said], None]
    move_bar: Callable[[int, int], None] = lambda done, total: None
    note: Callable[[str, float, float], None] = lambda what, begin, end: None
    clock: Callable[[], float] = time.monotonic
    model: str = ""

    def __post_init__(self) -> None:
        self._doing = ""
        self._reason = ""
        self._since = 0.0
        self._outdated = False  # what is shown is of a wait, and would be wrong of the work after it
        self.last: str = ""
        """What was shown last."""

    def begin(self, doing: str) -> None:
        """A request goes out: "load" or "step", what the ranks do when nothing else is to be said."""
        self._doing, self._reason, self._since = doing, doing, self.clock()

    def about(self, wait: Wait) -> None:
        reason, done, total = self._doing if wait.reason == "job" else wait.reason, wait.done, wait.total
        now = self.clock()
        if reason != self._reason:
            self._close(now)
            self._reason, self._since = reason, now
        seconds = now - self._since
        works = reason == self._doing
        if works and seconds < QUIET_SECONDS and not self._outdated:
            return
        text = self._say(reason, done, total, seconds)
        if text != self.last:
            self.tell(text)
            if reason == "weights":
                self.move_bar(done, max(total, 1))
        self._outdated = not works

    def watching(self, pool: PoolClient, should_cancel: Callable[[], bool], doing: str = "step") -> Callable[[], bool]:
        """`should_cancel` of a request that goes out: the client asks it many times a second while it waits, and each
        time the node is told what for."""
        self.begin(doing)

        def ask() -> bool:
            self.about(pool.waits_for)
            return should_cancel()

        return ask

    def tell(self, text: Said) -> None:
        """Show a text, whatever it is about."""
        self.last, self._outdated = text, False
        self.show(text)

    def end(self) -> None:
        """The request is through, or a step of it; what follows is the next one."""
        now = self.clock()
        self._close(now)
        self._reason, self._since = self._doing, now

    def _close(self, now: float) -> None:
        if self._reason:
            self.note(self._reason, self._since, now)

    def _say(self, reason: str, done: float, total: float, seconds: float) -> Said:
        if reason == "weights":
            done, total = round(done / 1e9, 1), round(total / 1e9, 1)
        return said(_WORDS[reason], done=done, total=total, seconds=int(seconds), model=self.model)


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
