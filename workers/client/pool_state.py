"""Whether a pool lives: as its supervisor says, or does not say any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

from parallel_runtime.errors import PoolError
from parallel_runtime.requests.control import Cancelled
from parallel_runtime.said import Said, said

from ..wire.error_info import revive
from ..wire.protocol import AskStatus, Status
from .silence import Silence
from .submission import ShouldCancel
from .supervisor_process import SupervisorProcess

POLL_SECONDS = 0.05


class PoolState:
    """The reader thread writes to it, and whoever waits for the pool reads.

    Args:
        supervisor: was started a moment ago.
        on_give_up: called when the supervisor was ended because it did not answer.
    """

    def __init__(self, supervisor: SupervisorProcess, on_give_up: Callable[[], None]):
        self.closed = False
        """Nothing comes from the supervisor any more."""
        self._supervisor = supervisor
        self._on_give_up = on_give_up
        self._status: Status | None = None
        self._changed = threading.Condition()
        self._given_up: PoolError | None = None
        self._silence = Silence(time.monotonic())

    @property
    def dead(self) -> bool:
        """The supervisor is gone, or has said that the pool is dead."""
        return self.closed or (self._status is not None and self._status.state == "dead")

    @property
    def starting(self) -> bool:
        """Not all ranks are online yet."""
        return not self.closed and (self._status is None or self._status.state == "starting")

    @property
    def arrivals(self) -> int:
        """How many ranks are online."""
        return len(self._status.devices) if self._status is not None else 0

    def heard(self) -> None:
        """Anything came from the supervisor."""
        self._silence.heard(time.monotonic())

    def note(self, status: Status) -> None:
        """Take in what the supervisor says."""
        with self._changed:
            self._status = status
            self._changed.notify_all()

    def close(self) -> None:
        """The connection has ended."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def wait_until_started(self, should_cancel: ShouldCancel) -> None:
        """Wait until the pool starts no longer, dead or alive.

        Raises:
            Cancelled: the artist did not want to wait.
            PoolError: see `mind_silence`.
        """
        with self._changed:
            while self.starting:
                if should_cancel():
                    raise Cancelled
                self.mind_silence()
                self._changed.wait(POLL_SECONDS)

    def ask(self, timeout: float) -> Status:
        """Ask the supervisor how the pool is. `silent` where no answer comes in time.

        Raises:
            PoolError: the pool is gone.
        """
        with self._changed:
            before = self._status
            self._supervisor.connection.offer(AskStatus())
            self._changed.wait_for(lambda: self._status is not before or self.closed, timeout)
            if self.closed and self._status is None:
                raise self.death()
            if self.closed or self._status is not before:
                assert self._status is not None
                return self._status
            known = before or Status("silent", {}, {}, 0, str(self._supervisor.log))
            return msgspec.structs.replace(known, state="silent")

    def mind_silence(self) -> None:
        """To be called while anything is awaited.

        Raises:
            PoolError: the supervisor does not answer, and was ended.
        """
        verdict = self._silence.tick(time.monotonic())
        if verdict == "ask":
            self._supervisor.connection.offer(AskStatus())
        elif verdict == "give up":
            self.give_up(said("did not answer for {seconds} seconds", seconds=f"{self._silence.seconds:.0f}"))
            raise self.death()

    def give_up(self, why: Said) -> None:
        """End the supervisor, stopped or not, and with it the pool."""
        self._given_up = self._supervisor.error(why)
        self.closed = True
        self._supervisor.end_by_force()
        self._on_give_up()

    def told_to_end(self) -> None:
        """Somebody wants another pool in its place, whoever works with this one."""
        self._given_up = PoolError("The pool was restarted while it worked for this.", "Queue the prompt again.")

    def death(self) -> PoolError:
        """Why the pool is gone, as an error to raise."""
        if self._given_up is not None:
            return self._given_up
        error = self._status.error if self._status is not None else None
        if error is not None:
            revived = revive(error)
            return PoolError(revived.cause, revived.fix)
        return self._supervisor.last_words()
