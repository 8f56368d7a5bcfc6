"""The job that the ranks of a pool are busy with: handed out, brought together, answered, or found to have stalled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from parallel_runtime.requests.requests import Step
from parallel_runtime.said import said

from ..state_folder import PoolLog
from ..wire.connection import Endpoint
from ..wire.frames import Frame
from ..wire.protocol import Abandon, Cancel, Done, ErrorInfo, Failed, Job, Launched, Ready, Run, of_all_ranks
from .members import Members

ALIKE_SECONDS = 5.0
"""So long after a rank failed in a run the others may fail alike: ranks compute in step, but a busy machine does not
run them so. Less costs a pool that could have lived; more is waited for in vain where one rank failed alone."""

FLOOR_SECONDS = 60.0
TICK_SECONDS = 0.5
_SUSPENDED_SECONDS = 4.0

Outcome = Literal["open", "ready", "refused", "finished", "unbegun", "failing", "alike", "broken"]
"""`open`: not all have answered. `ready`, `refused`: all have prepared it, or one could not. `finished`: all have run
it. `unbegun`: all have refused a call that was not prepared. `failing`: a rank failed in the run, and the others may
fail alike. `alike`: all have failed, or had no part, and launched the same exchanges, so that none waits for another.
`broken`: one failed, and what the others are waiting for is not known, or not the same."""


@dataclass
class ActiveJob:
    """A job's way through the two phases, without any input or output: `outcome` says when one ends."""

    number: int
    world_size: int
    phase: Literal["preparing", "running"] = "preparing"
    ready: dict[int, Ready] = field(default_factory=dict)
    failed: dict[int, Failed] = field(default_factory=dict)
    done: dict[int, Frame] = field(default_factory=dict)
    launched: dict[int, Launched] = field(default_factory=dict)
    cancelled: bool = False
    unread: bool = False
    """The rank whose end ends the pool had not read of it, or none was given it: done again, it does no harm."""

    def answer(self, frame: Frame) -> None:
        """Take in a rank's answer; one for another job, or for another phase, is a late one and is dropped."""
        message = frame.message
        if not isinstance(message, (Ready, Done, Failed)) or message.number != self.number:
            return
        if isinstance(message, Failed):
            self.failed[message.rank] = message
        elif isinstance(message, Ready) and self.phase == "preparing":
            self.ready[message.rank] = message
        elif isinstance(message, Done) and self.phase == "running":
            self.done[message.rank] = frame
        if not isinstance(message, Ready) and message.launched is not None:
            self.launched[message.rank] = message.launched

    def note_unread(self, rank: int) -> None:
        """A rank is the first that ends, and had not read all that was sent to it; nothing came of it since."""
        heard_of = rank in self.ready or rank in self.done or rank in self.failed
        self.unread = not heard_of and all(failed.error.consequence for failed in self.failed.values())

    @property
    def agreed(self) -> dict[str, int]:
        """The least of what the ranks offered under each name."""
        offers = [ready.offers for ready in self.ready.values()]
        return {name: min(each[name] for each in offers if name in each) for own in offers for name in own}

    @property
    def outcome(self) -> Outcome:
        """What the answers so far come to."""
        answered = {*self.failed, *(self.ready if self.phase == "preparing" else self.done)}
        everyone = len(answered) == self.world_size
        if self.phase == "preparing":
            return "open" if not everyone else "refused" if self.failed else "ready"
        if not self.failed:
            return "finished" if everyone else "open"
        unbegun = [failed.unbegun for failed in self.failed.values()]
        if any(unbegun):
            return "broken" if self.done or not all(unbegun) else "unbegun" if everyone else "open"
        counts = [each for own in self.launched.values() for each in own.items()]
        alike = all(self.launched.get(rank, {}).get(key) == count for key, count in counts for rank in key[0])
        if self.launched.keys() != answered or (everyone and not alike):
            return "broken"
        return "alike" if everyone else "failing"

    @property
    def failure(self) -> Failed:
        """The failure to tell: a real one before a cancelled one or its consequence, the lowest rank's first."""
        return min(self.failed.values(), key=lambda each: (each.cancelled, each.error.consequence, each.rank))


@dataclass
class StallWatch:
    """When no rank that is awaited has got on for so long, the pool has stalled.

    One rank alone that does not get on says nothing: it may wait in a collective for another that does, or for a step
    that others compute. Where one hangs, all of them stand still soon, and the one that stood still first is to blame.
    Time in which the supervisor missed its own ticks (a laptop slept) counts for nobody."""

    floor: float = FLOOR_SECONDS
    _counts: dict[int, int] = field(default_factory=dict)
    _since: dict[int, float] = field(default_factory=dict)
    _waits: dict[int, bool] = field(default_factory=dict)
    _last_tick: float = 0.0

    def start(self, ranks: int, now: float) -> None:
        """A job (or a phase of it) begins: every rank has made progress just now."""
        self._since = dict.fromkeys(range(ranks), now)
        self._last_tick = now

    def stop(self) -> None:
        """No job is on; nothing can stall."""
        self._since.clear()

    def beat(self, rank: int, count: int, now: float, waits: bool = False) -> None:
        """A heartbeat: `count` is another when the rank got on. Who `waits` for others is hardly to blame."""
        self._waits[rank] = waits
        if self._counts.get(rank) != count:
            self._counts[rank] = count
            self.answered(rank, now)

    def answered(self, rank: int, now: float) -> None:
        """A message of the job came from this rank."""
        if rank in self._since:
            self._since[rank] = now

    def through(self, rank: int) -> None:
        """This rank has done its part, and waits for the others: it is not awaited."""
        self._since.pop(rank, None)

    def waited(self, now: float) -> None:
        """A rank compiles, which may take minutes; the others may be waiting for it in a collective."""
        self._since = dict.fromkeys(self._since, now)

    def tick(self, now: float) -> tuple[int, float] | None:
        """Called every TICK_SECONDS; return the rank that stalled longest, if all have, and for how many seconds."""
        gap, self._last_tick = now - self._last_tick, now
        if gap > _SUSPENDED_SECONDS:
            self._since = {rank: since + gap for rank, since in self._since.items()}
            return None
        if not self._since or now - max(self._since.values()) <= self.floor:
            return None
        first = min(self._since, key=lambda rank: (self._waits.get(rank, False), self._since[rank]))
        return first, now - self._since[first]


class Jobs:
    """Hands one job after the other to the ranks, brings their answers together, and answers the client, who sends the
    next one then; a rank's failure while all run, which costs the pool, goes to `on_failure`."""

    def __init__(self, members: Members, client: Endpoint, log: PoolLog, on_failure: Callable[[Failed], None]):
        self.active: ActiveJob | None = None
        self.stall = StallWatch()
        self._members = members
        self._client = client
        self._log = log
        self._on_failure = on_failure
        self._open = True

    def close(self) -> None:
        """The pool ends: a job that comes now is for another one."""
        self._open = False

    async def begin(self, frame: Frame, job: Job) -> None:
        """Hand out a job of the client's."""
        assert self._members.complete
        assert self.active is None
        self.active = ActiveJob(job.number, self._members.size, unread=not self._open)
        if isinstance(job.request, Step):
            self.active.phase = "running"
        if self._open:
            self.stall.start(self._members.size, time.monotonic())
            await self._members.hand_out(frame)

    async def cancel(self, message: Cancel) -> None:
        """Tell the ranks to stop the active job."""
        if self.active is not None and self.active.number == message.number:
            self.active.cancelled = True
            await self._members.tell(message)

    async def answer(self, frame: Frame, message: Ready | Done | Failed) -> None:
        """Take in how a rank's part of the active job ended."""
        job = self.active
        if job is not None and job.number == message.number:
            job.answer(frame)
            self.stall.through(message.rank)
            await self._advance(job)

    async def _advance(self, job: ActiveJob) -> None:
        outcome = job.outcome
        if outcome == "ready":
            job.phase = "running"
            self.stall.start(self._members.size, time.monotonic())
            await self._members.tell(Run(job.number, job.agreed))
            if job.cancelled:
                await self._members.tell(Cancel(job.number))
        elif outcome == "finished":
            self._rest()
            await self._client.forward(job.done[0])
        elif outcome == "unbegun":
            self._rest()
            await self._client.send(job.failure)
        elif outcome == "refused":
            error = job.failure.error
            error = msgspec.structs.replace(error, fix=error.fix or said("The log is {log}.", log=self._log.path))
            await self._abandon(job, error, fits=tuple(sorted(job.ready)))
        elif outcome == "alike":
            error = of_all_ranks(job.failure.error, str(self._log.path))
            self._log.write(f"job {job.number} failed on every rank alike: {error.cause}")
            await self._abandon(job, error)
        elif outcome == "broken":
            self.blame(job)
        elif outcome == "failing":
            seconds = min(ALIKE_SECONDS, self.stall.floor / 2)  # what failed is told, not that nothing went on
            asyncio.get_running_loop().call_later(seconds, self.blame, job)

    async def _abandon(self, job: ActiveJob, error: ErrorInfo, fits: tuple[int, ...] = ()) -> None:
        """The job ends on every rank, also on those that had no part or could do it, and the pool lives."""
        await self._members.tell(Abandon(job.number))
        self._rest()
        await self._client.send(msgspec.structs.replace(job.failure, error=error, fits=fits, launched=None))

    def blame(self, job: ActiveJob | None) -> None:
        """Tell of the ranks that have failed in a job's run, if it goes on: the others do not fail alike."""
        if job is not None and job is self.active and job.phase == "running":
            for failed in job.failed.values():
                if not failed.unbegun:
                    self._on_failure(failed)

    def _rest(self) -> None:
        self.active = None
        self.stall.stop()
