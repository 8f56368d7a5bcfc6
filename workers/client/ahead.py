"""A loop that the ranks begin with before anybody waits for it."""

from __future__ import annotations

from typing import NamedTuple

from .held import same_bytes
from .life import OpenJob
from .node_requests import Submission
from .running_pool import RunningPool


class _Begun(NamedTuple):
    pool: RunningPool
    job: OpenJob
    submission: Submission


class Ahead:
    """What a pool's ranks are busy with, or have done, for a request that is thought to come next. The one that comes
    gets it if it asks for the very same, byte for byte; else it ends. Used by who has the pool's turn."""

    def __init__(self) -> None:
        self.served: OpenJob | None = None  # of the request at hand, where that was begun ahead
        self._begun: _Begun | None = None

    def begin(self, pool: RunningPool, submission: Submission) -> None:
        """Send it. Errors as of `RunningPool.begin`."""
        self.drop()
        self._begun = _Begun(pool, pool.begin(submission), submission)

    def take(self, pool: RunningPool, submission: Submission) -> OpenJob | None:
        """The job that is this request's, to be waited for; None where none was begun for it, and the ranks are free.
        Errors as of `RunningPool.settle`."""
        begun, self.served = self._begun, None
        if begun is None or begun.pool is not pool or not _same(begun.submission, submission):
            self.drop()
            return None
        self._begun, self.served = None, begun.job
        return begun.job

    def drop(self) -> None:
        """Nobody wants it any more."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.pool.leave(begun.job)
            begun.pool.settle()


def _same(one: Submission, other: Submission) -> bool:
    """Whether they ask for the same, and want it in the same place."""
    if one.request != other.request or one.device != other.device or one.tensors.keys() != other.tensors.keys():
        return False
    pairs = ((tensor, other.tensors[name]) for name, tensor in one.tensors.items())
    return all(
        tensor.dtype == its.dtype and tensor.shape == its.shape and same_bytes(tensor.cpu(), its.cpu())
        for tensor, its in pairs
    )
