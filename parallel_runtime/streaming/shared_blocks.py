"""The bytes of a network's blocks, dealt out over the ranks of one host, from which each rank fetches whole blocks.

Nothing here is a collective. A rank copies from the others' memory whenever it wants, so it makes no difference which
ranks a plan uses, and how often each of them runs the network; what a rank must know of the others it reads off their
boards, at points of a job to which all ranks come.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path

import psutil
import torch

from ..errors import OutOfMemoryError
from ..gpu_memory.arena import aligned
from .board import FINISHED, LAUNCHED, MADE, OPEN, STATE, Board, wait_for
from .dealer import Dealer
from .share_memory import DeviceShare, HostShare, OtherShare, open_share, room_on_host, unfilled_bytes


class SharedBlocks:
    """This rank's share of the blocks of one model, of so many bytes each, and its way to the others'."""

    def __init__(self, dealer: Dealer, sizes: Sequence[int]):
        self.sizes = tuple(sizes)
        self.device = dealer.device
        self.dealer = dealer
        self.board = Board()
        self._name = f"share-{hashlib.sha256(repr(dealer.key).encode()).hexdigest()[:32]}"
        self._pieces = [[_piece(size, rank, dealer.ranks) for size in sizes] for rank in range(dealer.ranks)]
        # In a rank's share a piece begins aligned, as a kernel that copies it wants; the share's size comes last.
        spans = [[aligned(stop - start) for start, stop in pieces] for pieces in self._pieces]
        self._starts = [list(accumulate(each, initial=0)) for each in spans]
        self._own: HostShare | DeviceShare | None = None
        self._other_ranks = [rank for rank in range(dealer.ranks) if rank != dealer.rank]
        self._boards: dict[int, Board] = {}
        self._others: dict[int, tuple[int, OtherShare | None]] = {}  # no share: its rank has let it go

    @property
    def state(self) -> int:
        """Which weights this rank's share has; 0 for none."""
        return self.board.words[STATE]

    @property
    def size(self) -> int:
        """Bytes of this rank's share."""
        return self._starts[self.dealer.rank][-1]

    def take(self) -> None:
        """Have memory for the share, not filled. torch.OutOfMemoryError, OutOfMemoryError: there is not enough."""
        if self._own is not None:
            return
        if not self.has_room():
            sizes = {"wanted": self._wanted_of_host(), "available": psutil.virtual_memory().available}
            what = "A share of the weights takes {wanted} GiB of the host's memory, of which {available} GiB are free."
            fix = "Close other programs, or choose spread as weights in Parallel Config."
            raise OutOfMemoryError(what, fix, **{name: f"{size / 2**30:.1f}" for name, size in sizes.items()})
        self._own = DeviceShare(self.size, self.device) if self.dealer.on_device else HostShare(self.size)
        self.board.words[STATE] = 0
        if self.dealer.folder is not None:
            path = self._path(self.dealer.rank)
            unfinished = path.with_suffix(".new")
            unfinished.write_text(f"{self.board.address} {self._own.address}")
            unfinished.rename(path)
        self.board.words[MADE] += 1

    def has_room(self) -> bool:
        """Whether the host has memory for the shares that are still to be filled."""
        # In this order: what another rank fills meanwhile does not count twice.
        return self.dealer.on_device or room_on_host() >= self._wanted_of_host()

    def is_nowhere(self) -> bool:
        """Whether no rank has a share any more."""
        return self._own is None and not any(self._path(rank).exists() for rank in self._other_ranks)

    def _wanted_of_host(self) -> int:
        """Bytes that this rank and the others have yet to fill: all of them begin at about the same time."""
        wanted = self.size
        for rank in self._other_ranks:
            try:
                wanted += unfilled_bytes(self._path(rank).read_text().split()[1])
            except FileNotFoundError:  # not made yet, or let go
                wanted += self._starts[rank][-1]
        return wanted

    def own_part(self, block: int, start: int, stop: int) -> tuple[int, torch.Tensor]:
        """Of these bytes of a block those that this rank keeps, if any: the first, and the memory that they lie in."""
        assert self._own is not None
        first, last = self._pieces[self.dealer.rank][block]
        low = max(first, start)
        at = self._starts[self.dealer.rank][block] + low - first
        return low, self._own.memory[at : at + max(min(last, stop) - low, 0)]

    def write(self, block: int, start: int, data: torch.Tensor) -> None:
        """Keep what this rank keeps of a block's bytes from `start` on, (bytes,) uint8 on any device."""
        low, memory = self.own_part(block, start, start + data.numel())
        if memory.numel():
            memory.copy_(data[low - start : low - start + memory.numel()])

    def begin_change(self) -> None:
        """Before this rank changes its share: nobody reads from it any more, and nobody begins to."""
        if self.board.words[STATE]:
            self.board.words[STATE] = 0
            self._wait_for_readers(lambda words: words[FINISHED] == words[LAUNCHED], "to finish its forward")

    def filled(self, state: str) -> None:
        """The share has the weights of this name."""
        if self.board.words[STATE] == _number(state):
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # others read without asking what is still being written
            if isinstance(self._own, HostShare):
                self._own.pin()
        self.board.words[STATE] = _number(state)

    def meet(self) -> bool:
        """Wait until the shares of all ranks have the weights that this rank's has. Every rank comes here in RUN.
        Returns whether one is elsewhere than it was: what was recorded would copy from there."""
        state = self.state
        assert state, "a share that is not filled"
        moved = False
        for rank in self._other_ranks:
            if rank not in self._boards:
                wait_for(self._path(rank), Path.exists, f"worker {rank} to have memory for its share")
            board = self._board(rank)
            wait_for(board.words, lambda told: told[STATE] == state, f"worker {rank} to have its share of the weights")
            moved |= self._open(rank, board)
        return moved

    def fetch(self, block: int, slot: torch.Tensor) -> None:
        """Copy a whole block to a slot, (bytes,) uint8, on the current stream."""
        own = self.dealer.rank
        # Ranks begin with different ones, so that they do not all read from one.
        for rank in ((own + step) % self.dealer.ranks for step in range(self.dealer.ranks)):
            start, stop = self._pieces[rank][block]
            if rank == own:
                slot[start:stop].copy_(self.own_part(block, start, stop)[1], non_blocking=True)
            elif start < stop:
                share = self._others[rank][1]
                assert share is not None
                share.copy_to(slot[start:stop], self._starts[rank][block])

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around a forward: others see that this rank reads from them."""
        self.board.words[LAUNCHED] += 1
        try:
            yield
        finally:
            self.board.count_finished(self.device)

    def close_gone(self) -> None:
        """Close what other ranks have let go of the host's memory, which is free when nobody has it open."""
        for rank, (made, share) in list(self._others.items()):
            if share is None or self.dealer.on_device or self._boards[rank].words[MADE] == made:
                continue
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            share.close()
            self._others[rank] = (made, None)  # another one will be elsewhere

    def give_back(self) -> None:
        """Let all shares go: those on devices by every rank in the same request, PoolError where one does not."""
        if self._own is None:
            return
        self.board.words[STATE] = 0
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for _, share in self._others.values():
            if share is not None:
                share.close()
        self._others.clear()
        self.board.words[OPEN] = 0
        if self.dealer.on_device:
            self._wait_for_readers(lambda words: not words[OPEN], "to let shared weights go")
        self._own.close()
        self._own = None
        self.board.words[MADE] += 1  # others see that it is gone
        if self.dealer.folder is not None:
            self._path(self.dealer.rank).unlink(missing_ok=True)

    def _wait_for_readers(self, there: Callable[[memoryview], bool], what: str) -> None:
        """For all that have a share: they may read from this one, which need not have read from theirs."""
        for rank in self._other_ranks:
            with suppress(FileNotFoundError):  # it has made none, or lets it go at this moment and reads no more
                wait_for(self._board(rank).words, there, f"worker {rank} {what}")

    def _board(self, rank: int) -> Board:
        if rank not in self._boards:
            self._boards[rank] = Board(self._path(rank).read_text().split()[0])
        return self._boards[rank]

    def _open(self, rank: int, board: Board) -> bool:
        """Have a rank's share; returns whether it takes the place of an older one."""
        made = board.words[MADE]
        known = self._others.get(rank)
        if known is not None and known[0] == made:
            return False
        if known is not None and known[1] is not None:
            known[1].close()
        share = open_share(self._path(rank).read_text().split()[1], self.device)
        self.board.words[OPEN] = 1
        if isinstance(share, HostShare):
            share.pin()
        self._others[rank] = (made, share)
        return known is not None

    def _path(self, rank: int) -> Path:
        assert self.dealer.folder is not None
        return self.dealer.folder / f"{self._name}-{rank}"


def _piece(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """(start, stop) of a rank's bytes in a block of so many; the last ranks may have fewer, or none. Every block is cut
    alike, so that ranks that fetch one fetch from all others at once."""
    length = aligned(-(-size // ranks))
    return min(rank * length, size), min((rank + 1) * length, size)


@functools.lru_cache(maxsize=64)
def _number(state: str) -> int:
    """A word that tells weights apart, never 0."""
    return int.from_bytes(hashlib.sha256(state.encode()).digest()[:7], "big") or 1
