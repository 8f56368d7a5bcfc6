"""Errors as data, on their way from a rank to the artist."""

from __future__ import annotations

import msgspec

from parallel_runtime.errors import ERROR_TYPES, ParallelError, PoolError

_LONGEST_TEXT = 4_000
_LONGEST_TRACEBACK = 50_000
"""Characters of an error: whatever is in it, it fits into a frame."""


class ErrorInfo(msgspec.Struct, frozen=True):
    """A `ParallelError` as data.

    Args:
        traceback: for the log and for developers, not for the artist.
        consequence: a collective broke because another rank was lost; that rank is to blame.
    """

    type: str
    cause: str
    fix: str
    rank: int | None = None
    traceback: str = ""
    consequence: bool = False


def describe(error: BaseException, rank: int | None, traceback: str = "") -> ErrorInfo:
    """Turn an exception into data. One that is not ours keeps its class name in the cause; its fix is left open."""
    traceback = _plain(traceback[-_LONGEST_TRACEBACK:])
    if isinstance(error, ParallelError):
        cause, fix = _plain(error.cause[:_LONGEST_TEXT]), _plain(error.fix[:_LONGEST_TEXT])
        return ErrorInfo(type(error).__name__, cause, fix, rank, traceback)
    where = "The worker pool" if rank is None else f"Rank {rank} of the worker pool"
    text = _plain(str(error).strip().split("\n")[0][:_LONGEST_TEXT])
    return ErrorInfo(
        "PoolError", f"{where} failed with {type(error).__name__}: {text.rstrip('.')}.", "", rank, traceback
    )


def of_all_ranks(info: ErrorInfo, log: str) -> ErrorInfo:
    """An error that all ranks raised alike, in a run: the model's own, so to say."""
    if info.type != "PoolError":
        return msgspec.structs.replace(info, fix=info.fix or f"The log is {log}.")
    cause = info.cause.replace(f"Rank {info.rank} of the worker pool failed", "The model failed on every rank")
    fix = f"See whether all that the sampler gets is made for this model, which stays loaded; the log is {log}."
    return msgspec.structs.replace(info, type="RequestError", cause=cause, fix=fix)


def _plain(text: str) -> str:
    """What can travel: names of files may hold bytes that are no UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def revive(info: ErrorInfo) -> ParallelError:
    """The exception that `describe` turned into data."""
    return ERROR_TYPES.get(info.type, PoolError)(info.cause, info.fix)
