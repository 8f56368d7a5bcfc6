"""What ran: the plan, the time per step, and the time line of the last prompt, for the panel and for texts on nodes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Hashable
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from parallel_runtime.requests.requests import PlanDetails

MOST_RUNS = 20
COMPARED_SECONDS = 3600.0  # a run on one GPU that is older is compared with no other: the machine may be another by now
MOST_SPANS = 400  # of a time line; of a longer prompt the last steps become one span


@dataclass(frozen=True)
class Span:
    """A part of a prompt's time, in seconds since the epoch: a reason of `Wait`, "load", "step" or "compile"."""

    what: str
    node: str
    begin: float
    end: float


@dataclass(frozen=True)
class RunRecord:
    """One sampling run, which ended so many seconds after the epoch."""

    model: str
    node: str
    plan: str
    latent: tuple[int, ...]
    steps: int  # 0 where that is not known
    step_seconds: float | None  # mean without the first one; None where there was only one
    one_gpu_seconds: float | None  # of the last run on one rank that was alike
    details: PlanDetails | None
    ended: float
    obstacles: tuple[str, ...] = ()  # why its loop went step by step; empty where the pool ran it

    @property
    def speedup(self) -> float | None:
        """Beside one GPU, where both were measured."""
        if self.step_seconds and self.one_gpu_seconds and not self.on_one_rank:
            return self.one_gpu_seconds / self.step_seconds
        return None

    @property
    def on_one_rank(self) -> bool:
        """Whether one rank computed everything."""
        return self.details is not None and all(degree == 1 for degree in self.details.degrees.values())


class RunHistory:
    """Of this process. Nodes write and the panel reads, from several threads."""

    def __init__(self) -> None:
        self.prompt = ""
        self.spans: list[Span] = []
        self.runs: deque[RunRecord] = deque(maxlen=MOST_RUNS)
        self._lock = threading.Lock()
        self._on_one_rank: dict[Hashable, RunRecord] = {}

    def span(self, prompt: str, span: Span) -> None:
        """A part of a prompt is over; that of another prompt begins a new time line."""
        with self._lock:
            if prompt != self.prompt:
                self.prompt, self.spans = prompt, []
            last = self.spans[-1] if self.spans else None
            if len(self.spans) >= MOST_SPANS and last is not None and last.what == span.what:
                self.spans[-1] = Span(last.what, last.node, last.begin, span.end)
            else:
                self.spans.append(span)

    def one_rank_seconds(self, kind: Hashable) -> float | None:
        """A step's seconds of the last run of this kind on one rank, if it was within the last hour."""
        last = self._on_one_rank.get(kind)
        return last.step_seconds if last is not None and time.time() - last.ended < COMPARED_SECONDS else None

    def ran(self, kind: Hashable, record: RunRecord) -> None:
        """A run is over, of a kind that is equal for runs which differ in nothing but their plan."""
        with self._lock:
            self.runs.append(record)
            if record.step_seconds is not None and record.on_one_rank:
                self._on_one_rank[kind] = record

    def to_mapping(self) -> dict[str, Any]:
        """Plain data; runs with the last one first."""
        with self._lock:
            return {
                "prompt": self.prompt,
                "timeline": [asdict(span) for span in self.spans],
                "runs": [_record(run) for run in reversed(self.runs)],
            }


def _record(run: RunRecord) -> dict[str, Any]:
    shown = {name: value for name, value in vars(run).items() if name != "obstacles"}
    loop = {"loop": "steps" if run.obstacles else "pool", "why": ", ".join(run.obstacles)}
    details = msgspec.to_builtins(run.details)
    return {**shown, **loop, "latent": list(run.latent), "speedup": run.speedup, "details": details}


HISTORY = RunHistory()
