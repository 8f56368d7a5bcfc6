"""Which tokens are whose while one block of a network runs: streams one after the other, a share of each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import is_
from typing import Any

import torch
from torch import Tensor

from ..exchange.head_routes import HeadSharing
from ..mesh.mesh import Mesh
from ..replaced import replaced
from .latent_patches import LatentPatch
from .modulation import Modulation
from .sequence_attention import AttendedTokens
from .shares import Streams, gather_shares
from .tables.blocks import Blocks

_RUNNING = threading.local()

RunBlock = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any], Any], Any]
"""(forward, args, kwargs, `Varying` of acceleration/compiled_methods.py) -> what it returns."""


class TokenSplit:
    """The share of the block that is running; one object per network. While no block runs whose tokens are shared out,
    `streams` is None, and attention is ComfyUI's own."""

    def __init__(self, mesh: Mesh):
        self.tokens = AttendedTokens(mesh)  # what the exchange reads of them
        self.patch: LatentPatch | None = None  # the tokens of a stage's forward; None where there are no stages
        self.streams: Streams | None = None
        self.attention: Callable[..., Tensor] | None = None  # over the tokens of all ranks (block_attention.py)
        self.alone: int | None = None  # a stream over which the running block attends without the others, too
        self.gathers_keys = False  # as the running block attends in pieces of its queries, and ranks may have others
        self.kept = 0  # keys that stand before those of the running block's tokens, on every rank
        self.keeps = False  # the network has computed in this forward, whole, what it keeps for the next ones
        self.gathered: tuple[Tensor, ...] = ()  # the keys and values that were gathered last, as they came and whole
        self.whole_queries = False
        self.run_block: RunBlock | None = None  # runs the forward of a block on this rank's tokens; None: it is called
        self.functions = False  # of nodes act between blocks, which are not given them: graphs are as without
        self.scales_by_input = False  # layers take the scale of what they are given from it (prepared_network.py)
        self.layers_alike = True  # every rank runs the same layers of a block that is cut
        self.modulation = Modulation()
        self.joined: dict[Any, tuple[Tensor, Tensor]] = {}  # tensors that all blocks are given, and this rank's share
        self._read: list[Any] = []
        self.pending: set[str] = set()  # lists of blocks of which the last has not run: their output is a share still
        self.set_mesh(mesh)

    def share_out(self, blocks: Blocks, whole: Mapping[str, Tensor]) -> Streams:
        """The tokens of a block that are computed here and now, of its token arguments."""
        lengths = {name: each.shape[blocks.tokens[name]] for name, each in whole.items()}
        if self.patch is not None:
            return self.patch.share_out(blocks, lengths, self.mesh)
        return Streams.share_out(lengths.values(), self.mesh)

    def set_mesh(self, mesh: Mesh) -> None:
        """Split over another mesh from the next forward on."""
        self.mesh = mesh
        self.degree = mesh.plan.sequence
        self.tokens.set_mesh(mesh)

    def begin(
        self, attention: Callable[..., Tensor], run: RunBlock | None, peers: HeadSharing | None, functions: bool = False
    ) -> None:
        """A forward begins; without `peers` the exchange of heads stays on collectives."""
        self.attention, self.run_block, self.tokens.peers, self.functions = attention, run, peers, functions
        self.tokens.noted.clear()
        self.pending.clear()
        self.joined.clear()
        self._read = []
        self.keeps = False

    def end(self) -> None:
        """A forward has ended: let go of what blocks had in common."""
        self.modulation.end()
        self.joined.clear()

    def read(self) -> list[Any]:
        """What attention reads beside arguments and weights, in this forward; a recording keeps it alive."""
        return list(self._read)

    def forget(self) -> None:
        """Let go of what is on the device."""
        self.tokens.forget()
        self._read = []

    @contextmanager
    def running(
        self, streams: Streams, batch: int, device: torch.device, alone: int | None = None, gathers_keys: bool = False,
        kept: int = 0,
    ) -> Iterator[None]:  # fmt: skip
        """Inside, attention goes over the tokens of all ranks."""
        outer, _RUNNING.split = running_split(), self
        before = self.streams, self.alone, self.gathers_keys, self.kept
        self.streams, self.alone, self.gathers_keys, self.kept = streams, alone, gathers_keys, kept
        try:
            self._lay_out(batch, device)
            yield
        finally:
            self.streams, self.alone, self.gathers_keys, self.kept = before
            self.gathered = ()
            _RUNNING.split = outer
            self._lay_out(batch, device)

    def _lay_out(self, batch: int, device: torch.device) -> None:
        self.tokens.start()
        if self.streams is not None and self.patch is None:
            self.tokens.split(self.streams.counts(), batch, device)
            read = self.tokens.wire, self.tokens.buffers
            if not any(all(map(is_, read, known)) for known in self._read):
                self._read.append(read)

    def outside(self) -> AbstractContextManager[None]:
        """Inside, attention is not over the tokens."""
        return replaced(self, "streams", None)

    def inside(self, where: str) -> AbstractContextManager[None]:
        """Inside, attention is as in submodules that the field `where` of `Blocks` names, "cross" or "gathers"."""
        if where == "cross":
            return self.outside()
        return replaced(self, "whole_queries", True) if where else nullcontext()

    def gather(self, share: Tensor, dim: int, length: int) -> Tensor:
        """One stream made whole. Collective over the sequence group."""
        group = self.mesh.sequence
        assert group is not None
        return gather_shares(share.contiguous(), dim, length, group, self.degree, self.mesh.speeds)

    def gather_all(self, share: Tensor, dim: int) -> Tensor:
        """The running block's streams made whole, one after the other. Collective over the sequence group."""
        assert self.streams is not None
        kept, *parts = share.split((self.kept, *self.streams.own), dim)
        whole = [self.gather(part, dim, length) for part, length in zip(parts, self.streams.lengths, strict=True)]
        return torch.cat([kept, *whole] if self.kept else whole, dim)


def running_split() -> TokenSplit | None:
    """The split of the block that runs in this thread; None outside of blocks that are cut."""
    return getattr(_RUNNING, "split", None)


def take(tensor: Tensor, dim: int, intervals: Sequence[tuple[int, int]]) -> Tensor:
    """The rows of `dim` in these intervals, one after the other; a view where it is one interval."""
    parts = [tensor.narrow(dim, start, stop - start) for start, stop in intervals]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def put(share: Tensor, dim: int, interval: tuple[int, int], length: int) -> Tensor:
    """A tensor of the whole length with the share in its place; what else is in it nobody has written."""
    placed = share.new_empty((*share.shape[:dim], length, *share.shape[dim + 1 :]))
    placed.narrow(dim, interval[0], interval[1] - interval[0]).copy_(share)
    return placed


def over_all_tokens(patch: Callable[[dict[str, Any]], Tensor], split: TokenSplit) -> Callable[..., Tensor]:
    """The patch (Wan's, of one dict), which takes and gives (B, tokens, ...) of all ranks; each rank computes it."""

    def run(arguments: dict[str, Any]) -> Tensor:
        streams = split.streams
        assert streams is not None
        own = sum(streams.own)
        whole = dict(arguments)
        for name, value in arguments.items():
            if isinstance(value, Tensor) and value.shape[1:2] == (own,):
                whole[name] = split.gather_all(value, 1)
        with split.outside():
            return take(patch(whole), 1, streams.intervals())

    return run
