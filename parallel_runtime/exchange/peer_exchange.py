"""Ulysses over peer memory: on GPUs of one host that can write to each other's memory, the exchange is those writes.

One kernel reads query, key and value where they are and writes each head to the rank that attends with it, in the
place where attention reads it; a second one writes the attended values back, in the place where they belong. NCCL
copies into send buffers, through its channels and out again: for FLUX.1 on two H200s a block's exchange took 190 us
with NCCL; what a step gains is in docs/performance.md.

passes.py gives the operator more to do where a block allows it:
- norm and rotary embedding of query and key, in the kernel that writes them to the ranks;
- the feed-forward layer of a block that attends and feeds forward from one input and projects both together
  (FLUX.1's single blocks): it is computed while heads are on their way, and its share of the output projection while
  attended values are. What travels beside a matrix product is moved by the GPU's copy engines and not by a kernel:
  the product wants every multiprocessor, and waits for one that a kernel has taken.

The two barriers of an attention also keep the buffers apart from call to call: a rank writes to a peer's `landing`
only after the peer came to the second barrier, so after its attention has read the call before; and to its `returned`
only after the next first barrier.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F

from ..attention.kernels import KERNELS
from ..attention.operators import operator, shapes_of
from ..attention.rotary import apply_norms
from .peer_memory import PeerBuffers

_WORD = torch.int64
"""Rows are moved as words of 8 bytes, whatever the dtype."""


def peer_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    kernel: str,
    degree: int,
    buffers: PeerBuffers,
    scale: float | None = None,
) -> torch.Tensor:
    """Attend over the tokens of all ranks; as `ulysses_attention`, for any lengths. Collective over the group.

    Args:
        kernel: key of KERNELS.
        buffers: for these shapes, heads rounded up to a multiple of `degree`.
    """
    heads = query.shape[2]
    if heads % degree:
        query, key, value = (F.pad(part, (0, 0, 0, -heads % degree)) for part in (query, key, value))
    attended = torch.ops.parallel_dit.peer_attention.default(
        [query], [key], [value], [], 0.0, [], buffers.memory, buffers.shape, buffers.table, buffers.group, kernel, scale
    )
    return attended.narrow(2, 0, heads) if heads % degree else attended


@operator(
    "peer_attention",
    "(Tensor[] queries, Tensor[] keys, Tensor[] values, Tensor[] norms, float eps, Tensor[] beside,"
    " Tensor memory, Tensor shape, Tensor table, str group, str kernel, float? scale) -> Tensor",
)
def attend_over_peers(
    queries: list[torch.Tensor],
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    norms: list[torch.Tensor],
    eps: float,
    beside: list[torch.Tensor],
    memory: torch.Tensor,
    shape: torch.Tensor,
    table: torch.Tensor,
    group: str,
    kernel: str,
    scale: float | None,
) -> torch.Tensor:
    """One operator from projections to attended values, or to what the block makes of them.

    It writes to `memory`, which is not declared as changed: nothing else reads it, and torch.compile would copy it.

    Args:
        queries, keys, values: (batch, tokens of the part, heads, head dim) for each part of the own tokens, such as
            text and image.
        norms: [], or what `rotary.apply_norms` makes of queries and keys: the weights of the norms of all queries,
            those of all keys, cos and sin.
        eps: of the norms.
        beside: [], or input x (batch, own tokens, width), weight and bias of the layer before a GELU (tanh), weight
            and bias of the layer over the attended values and what GELU gives.
        memory, shape, table, group: see PeerBuffers.

    Returns:
        Attended values (batch, own tokens, heads, head dim); with `beside` the last layer's (batch, own tokens, width).
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    ranks = symmetric_memory.rendezvous(memory, group)  # type: ignore[arg-type] # a str, before torch 2.13 too
    exchange = _Exchange(ranks, queries[0], memory, shape, table, bool(beside))
    exchange.send_heads(queries, keys, values, norms, eps)
    if not beside:
        exchange.ranks.barrier(channel=0)
        exchange.return_tokens(exchange.attend(kernel, scale))
        exchange.ranks.barrier(channel=0)
        return exchange.returned().transpose(0, 1).clone(memory_format=torch.contiguous_format)
    x, hidden_weight, hidden_bias, weight, bias = beside
    compute, links = torch.cuda.current_stream(), _links(memory.device.index)
    links.wait_stream(compute)
    with torch.cuda.stream(links):
        exchange.move_heads()
    rows = x.reshape(-1, x.shape[-1])
    hidden = torch._addmm_activation(hidden_bias, rows, hidden_weight.t(), use_gelu=True)
    compute.wait_stream(links)
    attended = exchange.attend(kernel, scale)
    links.wait_stream(compute)
    with torch.cuda.stream(links):
        exchange.move_tokens(attended)
    of_attended, of_hidden = weight.t().split([weight.shape[1] - hidden.shape[1], hidden.shape[1]])
    output = torch.addmm(bias, hidden, of_hidden)
    compute.wait_stream(links)
    output.addmm_(exchange.moved().transpose(0, 1).flatten(0, 1), of_attended)
    return output.reshape(*x.shape[:-1], weight.shape[0])


@shapes_of(attend_over_peers)
def _(queries: list[torch.Tensor], keys: Any, values: Any, norms: Any, eps: float, beside: Any, *memory: Any) -> Any:
    if beside:
        return beside[0].new_empty((*beside[0].shape[:-1], beside[3].shape[0]))
    batch, _, heads, head_dim = queries[0].shape
    return queries[0].new_empty((batch, sum(part.shape[1] for part in queries), heads, head_dim))


@functools.cache
def _links(device: int) -> torch.cuda.Stream:
    """The stream of a GPU that moves data to others beside its products; it comes first, as the products' end waits."""
    return torch.cuda.Stream(device, priority=-1)


class _Exchange:
    """The way of one attention's tensors between the ranks.

    `staging` is where heads of other ranks lie that copy engines are to move, (ranks, own tokens, batch, 3, heads /
    ranks, head dim); None where the kernel itself writes them to the others.
    """

    def __init__(
        self,
        ranks: Any,
        query: torch.Tensor,
        memory: torch.Tensor,
        shape: torch.Tensor,
        table: torch.Tensor,
        beside: bool,
    ):
        self.ranks, self.memory, self.table = ranks, memory, table
        self.batch, _, self.heads, self.head_dim = query.shape
        self.dtype = query.dtype
        self.offset, *lengths = shape.tolist()
        self.lengths: list[int] = lengths
        self.own = lengths[ranks.rank]
        self.heads_per_rank = self.heads // ranks.world_size
        # Of a token's heads of one rank, in all items of the batch.
        self.elements_per_token = self.batch * self.heads_per_rank * self.head_dim
        self.staging: torch.Tensor | None = None
        if beside:
            each = (self.own, self.batch, 3, self.heads_per_rank, self.head_dim)
            self.staging = query.new_empty((ranks.world_size, *each))

    @property
    def others(self) -> list[int]:
        """The other ranks; not everyone begins with the same."""
        return [(self.ranks.rank + step) % self.ranks.world_size for step in range(1, self.ranks.world_size)]

    def send_heads(
        self,
        queries: list[torch.Tensor],
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        norms: list[torch.Tensor],
        eps: float,
    ) -> None:
        """Write heads where they belong, those of other ranks to `staging` if there is one."""
        from .peer_kernels import push_heads, push_normed_heads

        place = (self.table, self.ranks.rank, self.ranks.world_size)
        if norms and self.head_dim & (self.head_dim - 1) == 0:
            push_normed_heads(queries, keys, values, norms, eps, *place, self.staging)
            return
        if norms:
            query, key = apply_norms(queries, keys, norms, eps)
            queries, keys = [query], [key]
        whole = [parts[0] if len(parts) == 1 else torch.cat(parts, 1) for parts in (queries, keys, values)]
        staging = None if self.staging is None else self.staging.flatten(4).view(_WORD)
        push_heads([_words(part) for part in whole], *place, staging)

    def move_heads(self) -> None:
        """Copy what is staged to the other ranks, and wait for theirs."""
        assert self.staging is not None
        start = sum(self.lengths[: self.ranks.rank]) * 3 * self.elements_per_token
        for to in self.others:
            self.ranks.get_buffer(to, self.staging.shape[1:], self.dtype, start).copy_(self.staging[to])
        self.ranks.barrier(channel=0)

    def attend(self, kernel: str, scale: float | None) -> torch.Tensor:
        """Attended values of this rank's heads, (batch, tokens of all ranks, heads / ranks, head dim)."""
        landing = self._view(0, (sum(self.lengths), self.batch, 3, self.heads_per_rank, self.head_dim))
        query, key, value = (part.transpose(0, 1) for part in landing.unbind(2))
        return KERNELS[kernel].attend(query, key, value, None, scale)

    def return_tokens(self, attended: torch.Tensor) -> None:
        """Write attended values to the ranks whose tokens they are, beside those of the other ranks."""
        from .peer_kernels import push_tokens

        push_tokens(_words(attended), self.table, self.ranks.rank, self.ranks.world_size)

    def returned(self) -> torch.Tensor:
        """What `return_tokens` of all ranks wrote here, (own tokens, batch, heads, head dim)."""
        return self._view(self.offset, (self.own, self.batch, self.heads, self.head_dim))

    def move_tokens(self, attended: torch.Tensor) -> None:
        """Copy attended values to the ranks whose tokens they are, and wait for what is ours; ranks one by one."""
        pieces = attended.transpose(0, 1).split(self.lengths)
        for to in (*self.others, self.ranks.rank):
            start = self.offset // self.dtype.itemsize + self.ranks.rank * self.lengths[to] * self.elements_per_token
            self.ranks.get_buffer(to, pieces[to].shape, self.dtype, start).copy_(pieces[to])
        self.ranks.barrier(channel=0)

    def moved(self) -> torch.Tensor:
        """What `move_tokens` of all ranks wrote here, (own tokens, batch, width): a copy."""
        shape = (self.ranks.world_size, self.own, self.batch, self.heads_per_rank * self.head_dim)
        return torch.cat(self._view(self.offset, shape).unbind(0), -1)

    def _view(self, start: int, shape: tuple[int, ...]) -> torch.Tensor:
        return self.memory[start : start + math.prod(shape) * self.dtype.itemsize].view(self.dtype).view(shape)


def _words(part: torch.Tensor) -> torch.Tensor:
    """(batch, tokens, heads, head dim) -> (batch, tokens, words): a token's heads lie side by side."""
    if part.stride(3) != 1 or part.stride(2) != part.shape[3]:
        part = part.contiguous()
    return part.flatten(2).view(_WORD)
