"""How ranks agree: by votes while they run, and by histories before.

A history tells whether the ranks of a group have recorded the same. That follows from the calls over the group and its
ranks' votes, which are the same on all. But a rank may lose what it had: another model took its place there, memory ran
out, a request did not use it. So each rank numbers what it has, offers the number in PREPARE (`Prepared.offers`), and
where numbers differ, every rank of the group begins anew in RUN, under a number that none of them had."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ..errors import PeerFailedError
from ..requests.control import Cancelled
from .mesh import Mesh

NONE = 0  # the number of a rank that has nothing, or lost it
_DTYPES = torch.float16, torch.bfloat16, torch.float32, torch.float64


def offer_history(ranks: Sequence[int], number: int) -> dict[str, int]:
    """What a rank of the group offers; the least of both tell the least and the largest number. Nothing of one rank."""
    name = _name(ranks)
    return {name: number, f"-{name}": -number} if len(ranks) > 1 else {}


def agreed_history(ranks: Sequence[int], agreed: Mapping[str, int]) -> int | None:
    """The number that all ranks of the group go on with: their own where it is the same, else a new one; None where
    nothing was offered."""
    name = _name(ranks)
    if name not in agreed:
        return None
    least, largest = agreed[name], -agreed[f"-{name}"]
    return least if least == largest != NONE else largest + 1


def _name(ranks: Sequence[int]) -> str:
    return f"recorded over {','.join(map(str, ranks))}"


def offer_same(name: str, value: object) -> dict[str, int]:
    """What a rank offers of a value that all ranks should have alike, and with the same repr on every machine."""
    digest = zlib.crc32(repr(value).encode())
    return {name: digest, f"-{name}": -digest}


def agreed_same(name: str, agreed: Mapping[str, int]) -> bool:
    """Whether all ranks offered the same."""
    return agreed[name] == -agreed[f"-{name}"]


def all_agree(agreed: bool, group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether all ranks of a group agree. Collective over it; None is this rank alone."""
    if group is None:
        return agreed
    vote = torch.tensor(int(agreed), device=device)
    dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=group)
    return bool(vote.item())


def all_same(number: int, group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether all ranks of a group have the same number, which is not NONE. Collective over it."""
    if group is None:
        return number != NONE
    both = torch.tensor([number, -number], device=device)
    dist.all_reduce(both, op=dist.ReduceOp.MIN, group=group)
    least, largest = both.tolist()
    return least == -largest != NONE


@contextmanager
def failing_at_the_next_vote(group: dist.ProcessGroup | None) -> Iterator[Callable[[], None]]:
    """Around work with exchanges, before each of which all ranks call what is given, with all memory taken that the
    exchange needs: what fails on one rank between two calls fails on all of them at the second (PeerFailedError). They
    vote once more at the end. The hosts vote, so that no GPU is waited for."""
    host = torch.device("cpu")

    def vote() -> None:
        if not all_agree(True, group, host):
            raise PeerFailedError("Another worker failed in its part of a step.", "See what that one says.")

    try:
        yield vote
    except (Cancelled, PeerFailedError, dist.DistError):
        raise  # on all ranks, or a peer is gone
    except Exception:
        all_agree(False, group, host)
        raise
    vote()


def agreed_dtype(own: torch.dtype | None, group: dist.ProcessGroup | None, device: torch.device) -> torch.dtype:
    """The type of what some ranks of a group have; `own` is None on the others. Collective over it."""
    index = torch.tensor(-1 if own is None else _DTYPES.index(own), device=device)
    dist.all_reduce(index, op=dist.ReduceOp.MAX, group=group)
    return _DTYPES[int(index.item())]


def of_first_rank(tensor: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Return what the first rank of this stage has. Collective over the stage's ranks; shapes and dtypes are alike."""
    # First along the batch axes, where each rank hears of the one with its own place in the sequence; so the first rank
    # of every sequence group has it, and hands it on.
    groups = [group for group in (mesh.batch, mesh.sequence) if group is not None]
    same = tensor.clone(memory_format=torch.contiguous_format) if groups else tensor
    for group in groups:
        dist.broadcast(same, src=dist.get_global_rank(group, 0), group=group)
    return same
