"""Attention over peer memory, all ranks of a group in one process: what each writes to the others is what they read.

The kernels that write run in Triton's interpreter where Triton is installed; elsewhere plain PyTorch stands for them,
and the memory, the offsets and the copies between ranks are still the product's.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric_memory
import torch.nn.functional as F

from parallel_runtime.acceleration.passes import linear_gelu, linear_of_parts
from parallel_runtime.attention.kernels import KERNELS
from parallel_runtime.attention.rotary import norm_rotate
from parallel_runtime.exchange import peer_exchange
from parallel_runtime.exchange.grown_memory import PeerBuffers
from parallel_runtime.exchange.peer_exchange import _Exchange, _words, attend_over_peers

PACK_ROOT = Path(__file__).resolve().parents[2]
BATCH, HEADS, HEAD_DIM = 2, 12, 16
CASES = [((5, 5), 2), ((8, 3), 1), ((4, 6, 5), 2), ((3, 9, 4, 4), 2)]
"""Tokens of each rank, and in how many parts a rank has them."""


class Ranks:
    """What one rank has of a group's symmetric memory."""

    def __init__(self, rank: int, memories: list[torch.Tensor]):
        self.rank, self.world_size, self._memories = rank, len(memories), memories

    def get_buffer(self, rank, sizes, dtype, offset):
        size = torch.Size(sizes).numel() * dtype.itemsize
        return self._memories[rank].view(torch.uint8)[offset * dtype.itemsize :][:size].view(dtype).view(sizes)

    def barrier(self, channel):
        """Ranks take turns here."""


class Group:
    """Exchanges of all ranks, and the tokens that they hold."""

    def __init__(self, lengths, parts, beside, dtype=torch.float32, each=2):
        generator = torch.Generator().manual_seed(0)
        degree, width = len(lengths), HEADS * HEAD_DIM
        landing = sum(lengths) * BATCH * 3 * width // degree * dtype.itemsize
        returned = max(lengths) * BATCH * width * dtype.itemsize
        self.memories = [torch.full((landing + returned,), 255, dtype=torch.uint8) for _ in lengths]
        table = [memory.data_ptr() + start for start in (0, landing) for memory in self.memories]
        self.table = torch.tensor([*table, *accumulate(lengths, initial=0)])
        self.lengths, self.exchanges, self.tokens = lengths, [], []
        for rank, own in enumerate(lengths):
            cuts = [own] if parts == 1 else [1, own - 1]
            tokens = torch.randn(3, BATCH, own, HEADS, HEAD_DIM, generator=generator).to(dtype)
            self.tokens.append([list(kind.split(cuts, 1)) for kind in tokens])
            buffers = PeerBuffers(self.memories[rank], landing, lengths, self.table, "")
            exchange = _Exchange(Ranks(rank, self.memories), tokens[0], buffers, beside)
            if exchange.staging is not None:
                exchange.staging.fill_(torch.nan)
            self.exchanges.append(exchange)
        angles = torch.randn(2, sum(lengths), HEAD_DIM // 2, generator=generator).repeat_interleave(each, -1)
        self.weights = torch.rand(2 * parts, HEAD_DIM, generator=generator).to(dtype)
        self.angles = [angle.split(lengths) for angle in angles]

    def norms(self, rank, normed):
        return [*self.weights, *(angle[rank] for angle in self.angles)] if normed else []

    def whole(self, normed):
        """Query, key and value of all tokens."""
        rotated = []
        for rank, (queries, keys, values) in enumerate(self.tokens):
            *weights, cos, sin = self.norms(rank, True)
            count = len(queries)
            pair = norm_rotate(queries, keys, weights[:count], weights[count:], 1e-6, cos, sin)
            rotated.append((*pair, torch.cat(values, 1)) if normed else [torch.cat(k, 1) for k in self.tokens[rank]])
        return [torch.cat(kind, 1) for kind in zip(*rotated, strict=True)]


def push_heads(parts, table, rank, ranks, staging=None):
    """What the kernel of this name does, by addresses."""
    words = parts[0].shape[2] // ranks
    for to in range(ranks):
        heads = torch.stack([part[:, :, to * words : (to + 1) * words] for part in parts], 2).transpose(0, 1)
        if staging is not None and to != rank:
            staging[to] = heads
        else:
            write(int(table[to]) + int(table[2 * ranks + rank]) * heads[0].nbytes, heads)


def push_tokens(attended, table, rank, ranks):
    """What the kernel of this name does, by addresses."""
    batch, _, words = attended.shape
    for owner in range(ranks):
        start, stop = int(table[2 * ranks + owner]), int(table[2 * ranks + owner + 1])
        for token in range(start, stop):
            for item in range(batch):
                place = ((rank * (stop - start) + token - start) * batch + item) * words * 8
                write(int(table[ranks + owner]) + place, attended[item, token])


def write(address, words):
    source = words.contiguous()
    ctypes.memmove(address, source.data_ptr(), source.nbytes)


@pytest.fixture
def plain_kernels(monkeypatch):
    """Plain PyTorch in the place of peer_kernels, which needs Triton."""
    module = types.ModuleType("peer_kernels")

    def push_normed_heads(queries, keys, values, norms, eps, table, rank, ranks, staging=None):
        *weights, cos, sin = norms
        count = len(queries)
        query, key = norm_rotate(queries, keys, weights[:count], weights[count:], eps, cos, sin)
        flat = None if staging is None else staging.flatten(4).view(torch.int64)
        push_heads([_words(part) for part in (query, key, torch.cat(values, 1))], table, rank, ranks, flat)

    vars(module).update(push_heads=push_heads, push_tokens=push_tokens, push_normed_heads=push_normed_heads)
    monkeypatch.setitem(sys.modules, "parallel_runtime.exchange.peer_kernels", module)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(("lengths", "parts"), CASES)
def test_every_rank_gets_attention_over_all_tokens_for_its_own(plain_kernels, lengths, parts, beside, normed):
    check(lengths, parts, beside, normed)


class Meeting(Ranks):
    """The same where ranks are threads, which wait for each other."""

    def __init__(self, rank, memories, barrier):
        super().__init__(rank, memories)
        self.barrier = lambda channel: barrier.wait(timeout=60)


@pytest.mark.parametrize("by_stores", [True, False])
@pytest.mark.parametrize("beside", ["nobody", "all", "some"])
@pytest.mark.parametrize(("lengths", "parts"), CASES)
def test_a_whole_attention_by_stores_or_copy_engines(plain_kernels, monkeypatch, lengths, parts, by_stores, beside):
    """Some: where a block is not compiled on one of the ranks, it has no layer beside its attention there."""
    group = Group(lengths, parts, beside == "all")
    with_layer = [beside == "all" or (beside == "some" and rank % 2 == 0) for rank in range(len(lengths))]
    barrier = threading.Barrier(len(lengths))
    meetings = {memory.data_ptr(): Meeting(rank, group.memories, barrier) for rank, memory in enumerate(group.memories)}
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(symmetric_memory, "rendezvous", lambda memory, name: meetings[memory.data_ptr()])
    monkeypatch.setattr(peer_exchange, "_links", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    moved, plain = [], _Exchange.move_heads
    monkeypatch.setattr(_Exchange, "move_heads", lambda exchange: (moved.append(1), plain(exchange)))
    width, inner = HEADS * HEAD_DIM, 10
    sizes = [(inner, 6), (inner,), (7, width + inner), (7,)]
    layers = [[torch.randn(BATCH, own, 6), *(torch.randn(size) for size in sizes)] for own in lengths]

    def attend(rank):
        landing = sum(lengths) * BATCH * 3 * width // len(lengths) * 4
        buffers = PeerBuffers(group.memories[rank], landing, lengths, group.table, "", by_stores)
        own, kernel = (*group.tokens[rank], group.norms(rank, True), 1e-6), KERNELS["sdpa"].attend
        return attend_over_peers(*own, layers[rank] if with_layer[rank] else [], kernel, buffers, None)

    with ThreadPoolExecutor(len(lengths)) as threads:
        found = list(threads.map(attend, range(len(lengths))))
    query, key, value = (part.transpose(1, 2) for part in group.whole(True))
    expected = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).split(lengths, 1)
    for got, own, (x, *layer), has_layer in zip(found, expected, layers, with_layer, strict=True):
        if has_layer:
            own = linear_of_parts([own.flatten(2), linear_gelu(x, *layer[:2])], *layer[2:])
        assert got.shape == own.shape
        assert got.is_contiguous()
        torch.testing.assert_close(got, own, rtol=1e-4, atol=1e-4)
    assert len(moved) == (sum(with_layer) if by_stores else len(lengths))


def check(lengths, parts, beside, normed, dtype=torch.float32, tolerance=1e-5, each=2):
    group = Group(lengths, parts, beside, dtype, each)
    query, key, value = (part.transpose(1, 2) for part in group.whole(normed))
    expected = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).split(lengths, 1)
    for rank, (exchange, tokens) in enumerate(zip(group.exchanges, group.tokens, strict=True)):
        exchange.send_heads(*tokens, group.norms(rank, normed), 1e-6)
    for exchange in group.exchanges:
        if beside:
            exchange.move_heads()
    attended = [exchange.attend(KERNELS["sdpa"].attend, None) for exchange in group.exchanges]
    for exchange, values in zip(group.exchanges, attended, strict=True):
        (exchange.move_tokens if beside else exchange.return_tokens)(values)
    for exchange, own in zip(group.exchanges, expected, strict=True):
        got = exchange.returned().unflatten(-1, (HEADS, HEAD_DIM))
        assert (got.float() - own.float()).abs().max() < tolerance


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_kernels_themselves_in_tritons_interpreter():
    # A process of its own: the interpreter is chosen when Triton is imported.
    code = "from tests.parallel_runtime.test_peer_exchange import check_kernels; check_kernels()"
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        cwd=PACK_ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        timeout=600,
    )


def check_kernels():
    for lengths, parts in CASES:
        for beside in (False, True):
            for normed in (False, True):
                check(lengths, parts, beside, normed)
    check((5, 5), 2, True, True, torch.bfloat16, 0.03)
    check((4, 6), 2, True, True, each=1)
    check_rotation()


def check_rotation():
    """The kernel without an exchange: angles twice, and once as they lie in rotation matrices."""
    from parallel_runtime.attention.rotary_kernel import launch

    generator = torch.Generator().manual_seed(1)
    parts = [[torch.randn(BATCH, own, HEADS, HEAD_DIM, generator=generator) for own in (3, 4)] for _ in range(2)]
    weights = [[torch.rand(HEAD_DIM, generator=generator) for _ in range(2)] for _ in range(2)]
    for batch in (1, BATCH):
        matrices = torch.randn(batch, 7, HEAD_DIM // 2, 2, 2, generator=generator)
        angles = [matrices[..., row, 0] for row in range(2)]
        twice = [angle.repeat_interleave(2, -1) for angle in angles]
        expected = norm_rotate(*parts, *weights, 1e-6, *twice)
        for given in (angles, twice):
            for found, wanted in zip(launch(*parts, *weights, 1e-6, *given), expected, strict=True):
                assert (found - wanted).abs().max() < 1e-5
