"""What the node that samples says meanwhile: that the ranks compile, that stages run in turn. No ComfyUI needed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

log = logging.getLogger("parallel_dit")

IN_TURN = "Step by step, the stages run one after the other: exact, but slower than one GPU."
USE_PARALLEL_SAMPLER = (
    "Use Parallel Sampler: KSampler runs the stages one after the other, which is exact but slower than one GPU."
)


def explain_stages(stages: int, keeps_pixels: bool = False) -> str:
    """What Parallel Loader adds to the plan of a model that is split into stages; "" for a whole one.

    Args:
        keeps_pixels: the stages work in turn under Parallel Sampler too, and the plan says so.
    """
    return "" if stages == 1 or keeps_pixels else USE_PARALLEL_SAMPLER


class RunNotices:
    """The notices of one model's runs.

    Args:
        show: puts a text on the node that is running.
        clock: seconds.
    """

    def __init__(self, show: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self._show = show
        self._clock = clock
        self._compiles_since: float | None = None
        self._last = ""
        self._told_of_stages = False
        self._loads = False

        self._plan, self._steps = "", 0
        self._latent: tuple[int, ...] = ()
        self._times: list[float] = []

    def begin(self) -> None:
        """A sampling run begins."""
        self._plan, self._times = "", []
        self._compiles_since = None
        self._told_of_stages = False

    def compiling(self) -> None:
        """A rank compiles; several may, and each says so every second."""
        if self._compiles_since is None:
            self._compiles_since = self._clock()
        text = f"Compiling for this size: about a minute, once ({self._seconds} s so far)."
        if text != self._last:
            self._last = text
            self._show(text)

    def loading(self, progress: tuple[int, int] | None) -> None:
        """The ranks bring weights to their GPUs: (bytes there, bytes in all); None when they do not."""
        if progress is None:
            return
        self._loads = True
        done, total = (round(size / 1e9, 1) for size in progress)
        text = f"Loading: {done} of {total} GB."
        if text != self._last:
            self._last = text
            self._show(text)

    def ran(self, plan: str, latent: Sequence[int], steps: int) -> None:
        """A call or a loop has run.

        Args:
            plan: in words.
            latent: shape of x.
            steps: of the whole run; 0 where that is not known.
        """
        self._plan, self._latent, self._steps = plan, tuple(latent), steps

    def summary(self) -> str:
        """The plan that ran, for the latent that it ran on, and what a step took; "" where nothing ran."""
        if not self._plan:
            return ""
        text = f"latent {' × '.join(map(str, self._latent[2:]))}, {self._plan}"
        calls = len(self._times)
        if calls < 2:
            return text  # the only one may have compiled
        from parallel_runtime.planning.explanation import show_seconds

        seconds = (self._times[-1] - self._times[0]) / (calls - 1)
        return f"{text} {show_seconds(seconds * calls / (self._steps or calls))} per step."

    def computed(self) -> None:
        """A step is through: whatever was compiled for it is ready."""
        self._times.append(self._clock())
        if self._loads:
            self._loads = False
            self._tell("Loaded.", logging.INFO)
        if self._compiles_since is not None:
            self._tell(f"Compiled in {self._seconds} s.", logging.INFO)
            self._compiles_since = None

    def in_turn(self) -> None:
        """A step ran through the stages one after the other; told once a run."""
        if not self._told_of_stages:
            self._told_of_stages = True
            self._tell(f"{IN_TURN} Parallel Sampler runs them at the same time.", logging.WARNING)

    @property
    def _seconds(self) -> int:
        return 0 if self._compiles_since is None else round(self._clock() - self._compiles_since)

    def _tell(self, text: str, level: int) -> None:
        log.log(level, "Parallel DiT: %s", text)
        self._last = text
        self._show(text)
