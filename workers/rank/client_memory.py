"""A rank's view of the memory that it shares with the client."""

from __future__ import annotations

from ..wire.protocol import Job
from ..wire.shared_memory import Segment


class ClientMemory:
    """The segment of the last job that had one.

    Args:
        for_all: whether every rank copies a job's tensors for itself; else rank 0 alone does.
        rank: of this process.
    """

    def __init__(self, *, for_all: bool, rank: int):
        self.for_all = for_all
        self._rank = rank
        self._segment: Segment | None = None

    def of(self, job: Job) -> Segment | None:
        """The segment in which the job's tensors lie, if this rank takes them out of one: opened in PREPARE, as the
        client may have let go of it since, where it did not wait for a cancelled job."""
        return self._segment if self._shares(job) else None

    def open_for(self, job: Job) -> None:
        """Open the job's segment, if it has one for this rank. The client makes another one where a job needs more
        memory; a step needs none.

        Raises:
            SegmentError: it cannot be opened.
        """
        if not self._shares(job) or (self._segment is not None and self._segment.is_at(job.segment)):
            return
        if self._segment is not None:
            self._segment.close()
            self._segment = None
        self._segment = Segment.open(job.segment)

    def _shares(self, job: Job) -> bool:
        """The same for all ranks of a kind of pool."""
        return bool(job.segment) and (self.for_all or self._rank == 0)
