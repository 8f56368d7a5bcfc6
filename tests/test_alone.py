"""A rank that is alone receives what it sends: as if the others were like it (benchmarks/alone.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import alone
from parallel_runtime.attention.kernels import KERNELS
from parallel_runtime.attention.rotary import apply_norms
from parallel_runtime.exchange import grown_memory
from parallel_runtime.exchange.grown_memory import ExchangedHeads, HostMemory
from parallel_runtime.exchange.host_exchange import attend_through_host
from parallel_runtime.exchange.host_gather import gather_through_host
from tests.parallel_runtime.host_route_run import layers_of
from tests.parallel_runtime.polled_memory import PolledMemory
from tests.ranks import run_ranks


def attend(rank: int, world_size: int, ranks: int) -> dict[str, Any]:
    """Run by `run_ranks` on one rank: how far attention is from that to `ranks` times its own keys, of inputs that are
    gathered, and of heads, of which the others' are this rank's other ones; and which words are left behind."""
    dist.destroy_process_group()
    grown_memory.StreamMemory = PolledMemory  # type: ignore[misc]
    alone.begin(ranks)
    heads, lengths, like = 2 * ranks, (5,) * ranks, torch.zeros(1, 16)
    memory = HostMemory(dist.group.WORLD)
    buffers = memory.buffers(ExchangedHeads(lengths, 1, heads, 16, like.dtype, like.device))
    assert buffers is not None
    layers, norms, sizes = layers_of(0, lengths, 1, heads, like)
    queries, keys, values = layers.whole()
    query, key = apply_norms(queries, keys, norms, 1e-6)
    value, kernel = torch.cat(values, 1), KERNELS["sdpa"].attend
    gathered = gather_through_host(layers, norms, 1e-6, sizes, kernel=kernel, buffers=buffers)
    many = kernel(query, key.repeat(1, ranks, 1, 1), value.repeat(1, ranks, 1, 1), None, None)
    by_heads = attend_through_host(query, key, value, kernel=kernel, buffers=buffers)
    whole = [torch.cat(each.chunk(ranks, 2), 1) for each in (query, key, value)]
    expected = torch.cat(kernel(*whole, None, None).chunk(ranks, 1), 2)
    words = memory._memory.words()  # type: ignore[union-attr]
    apart = [float((gathered - many).abs().max()), float((by_heads - expected).abs().max())]
    return {"apart": apart, "words": sorted(words)}


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_is_alone_exchanges_with_itself(ranks):
    (found,) = run_ranks(1, f"{__name__}:attend", {"ranks": ranks})
    assert max(found["apart"]) < 1e-5
    assert found["words"] == [0]
