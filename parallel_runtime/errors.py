"""Typed errors. Each names its cause and its fix, and reads as one sentence pair in the artist's error dialog."""

from __future__ import annotations

from collections import deque

from .said import Said, as_said, together

LAST: deque[Said] = deque(maxlen=32)
"""What the last errors of this process say, for whoever gets one of them as a string."""


class ParallelError(Exception):
    """Base of every error this project raises on purpose: what went wrong, with the names and numbers that matter, and
    what the artist can do about it, one sentence each (`Said`, or a template); `values` are what the templates name."""

    def __init__(self, cause: str, fix: str, /, **values: object):
        self.cause, self.fix = (as_said(text, **values) for text in (cause, fix))
        super().__init__(self.cause, self.fix)
        LAST.append(self.said)

    def __str__(self) -> str:
        return str(self.said)

    @property
    def said(self) -> Said:
        """Cause and fix."""
        return together((self.cause, self.fix))


class ConfigurationError(ParallelError):
    """The parallel configuration cannot hold: degrees, devices, options."""


class CheckpointError(ParallelError):
    """A model file is missing, damaged, or not what its name says."""


class UnsupportedModelError(ParallelError):
    """The checkpoint is sound, but no model we have describes it."""


class RequestError(ParallelError):
    """A forward or sampling request that the loaded model cannot serve."""


class PeerFailedError(ParallelError):
    """Another rank of a mesh failed in its part of a call, and tells why: nothing is wrong with this one's."""


class NotLoadedError(RequestError):
    """A request for a model that the ranks do not have, or have forgotten; loading it again helps."""


class OutOfMemoryError(ParallelError):
    """A device has too little free memory for what was asked of it."""


class PoolError(ParallelError):
    """The worker pool could not start, or died while it worked."""


class PoolLostError(PoolError):
    """The worker pool died before it began with a request, which a fresh one may serve."""


class SegmentError(PoolError):
    """Memory cannot be shared between the client and the ranks on this machine; there is another way."""


def first_line(error: Exception) -> str:
    """What an error says, in a line."""
    return next(iter(str(error).splitlines()), type(error).__name__)


ERROR_TYPES: dict[str, type[ParallelError]] = {
    cls.__name__: cls
    for cls in (
        ConfigurationError, CheckpointError, UnsupportedModelError, RequestError, NotLoadedError, OutOfMemoryError,
        PoolError, SegmentError,
    )
}  # fmt: skip
