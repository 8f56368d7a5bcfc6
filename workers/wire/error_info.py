"""Errors as data, on their way from a rank to the artist."""

from __future__ import annotations

import msgspec

from parallel_runtime.errors import ERROR_TYPES, ParallelError, PoolError
from parallel_runtime.said import Said, as_said, said

_LONGEST_TEXT = 4_000
_LONGEST_TRACEBACK = 50_000
"""Characters of an error: whatever is in it, it fits into a frame."""


class ErrorInfo(msgspec.Struct, frozen=True):
    """A `ParallelError` as data, with a traceback for the log; `consequence`: another rank that was lost or failed is
    to blame."""

    type: str
    cause: Said
    fix: Said
    rank: int | None = None
    traceback: str = ""
    consequence: bool = False


_RANK_FAILED = "Worker {rank} failed with {error}."


def describe(error: BaseException, rank: int | None, traceback: str = "") -> ErrorInfo:
    """Turn an exception into data. One that is not ours keeps its class name in the cause; its fix is left open."""
    traceback = _plain(traceback[-_LONGEST_TRACEBACK:])
    if isinstance(error, ParallelError):
        return ErrorInfo(type(error).__name__, _portable(error.cause), _portable(error.fix), rank, traceback)
    text = _plain(str(error).strip().split("\n")[0][:_LONGEST_TEXT])
    what = f"{type(error).__name__}: {text.rstrip('.')}"
    cause = said("The workers failed with {error}.", error=what)
    if rank is not None:
        cause = said(_RANK_FAILED, rank=rank, error=what)
    return ErrorInfo("PoolError", cause, Said(""), rank, traceback)


def of_all_ranks(info: ErrorInfo, log: str) -> ErrorInfo:
    """An error that ended a run on all ranks, none of which waits: the model's own, so to say."""
    if info.type != "PoolError":
        return msgspec.structs.replace(info, fix=info.fix or said("The log is {log}.", log=log))
    cause = info.cause
    if cause.template == _RANK_FAILED and isinstance(cause.values, dict):
        cause = said("The model failed with {error}.", error=cause.values["error"])
    fix = "See whether all that the sampler gets is made for this model, which stays loaded; the log is {log}."
    return msgspec.structs.replace(info, type="RequestError", cause=cause, fix=said(fix, log=log))


def _portable(text: Said) -> Said:
    """A text that can travel, with what it is made of unless that is too long."""
    if len(text) > _LONGEST_TEXT or _plain(text) != text:
        return as_said(_plain(text[:_LONGEST_TEXT]))
    return text


def _plain(text: str) -> str:
    """What can travel: names of files may hold bytes that are no UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def revive(info: ErrorInfo) -> ParallelError:
    """The exception that `describe` turned into data."""
    return ERROR_TYPES.get(info.type, PoolError)(info.cause, info.fix)
