"""Messages between client, supervisor and ranks, msgspec structs, errors among them; `frames.py` puts them on a socket.

A job goes through two phases. PREPARE: every rank validates, loads and allocates, and answers `Ready` or `Failed`;
an error here costs the job only. RUN starts when all are ready; a failure in it costs the pool. A `Step` repeats a
call that was prepared before, and goes to RUN at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from parallel_runtime.errors import ERROR_TYPES, ParallelError, PoolError
from parallel_runtime.requests.requests import Answer, Request
from parallel_runtime.said import Said, as_said, said

VERSION = 19
_LONGEST_TEXT, _LONGEST_TRACEBACK = 4_000, 50_000  # characters of an error: whatever is in it, it fits into a frame
_RANK_FAILED = "Worker {rank} failed with {error}."

PoolState = Literal["starting", "idle", "preparing", "running", "dead", "silent"]
"""`silent` is what the client says of a supervisor that does not answer."""


class ErrorInfo(msgspec.Struct, frozen=True):
    """A `ParallelError` as data, with a traceback for the log; `consequence`: another rank is to blame."""

    type: str
    cause: Said
    fix: Said
    rank: int | None = None
    traceback: str = ""
    consequence: bool = False


class TensorSpec(msgspec.Struct, frozen=True):
    """A tensor in the payload: name, torch dtype's name, shape. Its bytes follow those of the one before it."""

    name: str
    dtype: str
    shape: tuple[int, ...]


# client -> supervisor, and onwards to every rank (its payload to rank 0 alone)
class Job(msgspec.Struct, frozen=True, tag=True):
    """A request with its number and the tensors that come with it: in the payload, or in the first half of a `segment`
    of shared memory, by its path, whose second half takes the answer's (tensors.py)."""

    number: int
    request: Request
    tensors: tuple[TensorSpec, ...] = ()
    segment: str = ""


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Stop this job between two steps (or in the middle of a load)."""

    number: int


class AskStatus(msgspec.Struct, frozen=True, tag=True):
    """Ask for a `Status` now, whatever the pool is doing."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the pool."""


# supervisor -> ranks
class Run(msgspec.Struct, frozen=True, tag=True):
    """All ranks are ready: run the prepared job, with the least of what they offered under each name."""

    number: int
    agreed: dict[str, int] = {}


class Abandon(msgspec.Struct, frozen=True, tag=True):
    """Another rank could not prepare: undo what preparing did."""

    number: int


# rank -> supervisor
class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message on a rank's connection; `world_size`: ranks that torchrun counts, as many as machines bring."""

    rank: int
    world_size: int = 1


class Online(msgspec.Struct, frozen=True, tag=True):
    """This rank has its device and its process group; `host` names its machine where that is not the supervisor's."""

    rank: int
    device: str
    host: str = ""


class Lost(msgspec.Struct, frozen=True, tag=True):
    """Of rank 0: this rank, on another machine, is gone or says nothing any more."""

    rank: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """This rank has prepared the job; `offers`: what it has, by name, where ranks may differ and must act alike."""

    number: int
    rank: int
    offers: dict[str, int] = {}


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Once a second. `progress` rises whenever the rank gets on; `waits`: it is inside of a collective."""

    rank: int
    progress: int
    waits: bool = False


# rank -> supervisor -> client
class Progress(msgspec.Struct, frozen=True, tag=True):
    """Rank 0 finished a step; the denoised latent comes along where a preview was asked for."""

    number: int
    step: int
    total: int
    tensors: tuple[TensorSpec, ...] = ()


class Doing(msgspec.Struct, frozen=True, tag=True):
    """What a rank is at that takes long, again and again while it is: rank 0 has `done` of `total` bytes of `weights`
    on its device, or is `measuring`, once for this machine; any rank may `compile`, and the others may wait for it."""

    number: int
    what: Literal["weights", "measuring", "compile"]
    done: int = 0
    total: int = 0


Launched = Mapping[tuple[tuple[int, ...], str], int]
"""(ranks, name) -> how many exchanges a rank has launched among these; see parallel_runtime/mesh/launched.py."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """The job is through; rank 0's carries the result, or with `in_segment` left it in the job's segment, unless it was
    `cancelled`. `launched`: of a rank that had no part in it; `finite`: the result has no NaN and nothing infinite."""

    number: int
    rank: int
    answer: Answer
    cancelled: bool = False
    tensors: tuple[TensorSpec, ...] = ()
    in_segment: bool = False
    launched: Launched | None = None
    finite: bool = True


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The job failed. From the supervisor, `pool_alive` says whether the pool lives on, and `fits` names the ranks
    that could have done it; from a rank that failed in RUN, and whose exchanges have all come to an end, `launched`.
    `unbegun`: of a `Step`, which has no PREPARE: this rank keeps no such call, and none does, then; of a pool that
    died: no rank was given the job."""

    number: int
    rank: int
    error: ErrorInfo
    cancelled: bool = False
    unbegun: bool = False
    pool_alive: bool = True
    fits: tuple[int, ...] = ()
    launched: Launched | None = None


# supervisor -> client
class Status(msgspec.Struct, frozen=True, tag=True):
    """State of the pool."""

    state: PoolState
    pids: dict[int, int]
    devices: dict[int, str]
    error: ErrorInfo | None = None


_OfClient = Job | Cancel | AskStatus | Shutdown
_OfSupervisor = Run | Abandon | Status
_OfRank = Hello | Lost | Online | Ready | Heartbeat | Progress | Doing | Done | Failed
Message = _OfClient | _OfSupervisor | _OfRank


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
