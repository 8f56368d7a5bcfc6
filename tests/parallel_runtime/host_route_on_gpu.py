"""The way through the host's memory on a GPU that the ranks share, launched and replayed; run by tests."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from parallel_runtime.attention.kernels import KERNELS
from parallel_runtime.exchange.grown_memory import ExchangedHeads
from parallel_runtime.exchange.head_routes import HeadRoutes
from parallel_runtime.exchange.host_exchange import HostBuffers, attend_through_host
from parallel_runtime.exchange.host_gather import gather_through_host
from tests.parallel_runtime.host_route_run import both_ways, cut_so, gathered, layers_of, made_first, with_layer


def on_gpu(rank: int, world_size: int, cases: list[list[Any]]) -> dict[str, Any]:
    """As `compare`, on a GPU that the ranks share: launched, and replayed twice from one recording with other values;
    and what route a group of ranks on one GPU takes."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    routes = HeadRoutes(dist.group.WORLD)
    found: dict[str, Any] = {"launched": [], "replayed": [], "beside": [], "gathered": []}
    for batch, heads, lengths, chunks, pieces, scale in cases:
        padded = -(-heads // world_size) * world_size
        shape = ExchangedHeads(tuple(lengths), batch, padded, 128, torch.bfloat16, device)
        memory = cut_so(chunks, pieces) if chunks else routes
        buffers = memory.buffers(shape)
        found["through host"] = isinstance(buffers, HostBuffers)
        assert isinstance(buffers, HostBuffers)
        generator = torch.Generator(device).manual_seed(heads)
        whole = [torch.randn(3, batch, sum(lengths), heads, 128, device=device, generator=generator) for _ in range(3)]
        whole = [each.to(torch.bfloat16) for each in whole]
        both = [both_ways(rank, buffers, each, scale) for each in whole]
        found["launched"] += [torch.equal(*pair) for pair in both]
        found["replayed"] += replay(rank, buffers, whole, [expected for _, expected in both], scale)
        if heads % world_size == 0:
            found["beside"].append(with_layer(rank, buffers, batch, heads, whole[0]))
            found["gathered"].append(gathered(rank, buffers, batch, heads, whole[0]))
            found["replayed"].append(replay_both(rank, buffers, batch, heads, whole[0]))
    return found


def replay(
    rank: int, buffers: HostBuffers, whole: list[torch.Tensor], expected: list[torch.Tensor], scale: float | None
) -> list[bool]:
    """Whether a recording of two attentions, one of the other's result, gives the bits of those that were launched.

    The last rank launches plainly what the others replay, now and then.
    """
    start = sum(buffers.lengths[:rank])
    own = [each[:, :, start : start + buffers.lengths[rank]] for each in whole]
    static = own[0].clone()
    kernel = KERNELS["sdpa"].attend

    def twice() -> tuple[torch.Tensor, torch.Tensor]:
        first = attend_through_host(*static, kernel=kernel, buffers=buffers, scale=scale)
        return first, attend_through_host(first, *static[1:], kernel=kernel, buffers=buffers, scale=scale)

    launched = []
    for each in own:
        static.copy_(each)
        launched.append([part.clone() for part in twice()])
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        output = twice()
    alike = []
    for count in range(6):
        index = count % len(own)
        static.copy_(own[index])
        if rank == len(buffers.lengths) - 1 and count % 2:
            outputs = twice()
        else:
            graph.replay()
            outputs = output
        torch.cuda.synchronize()
        alike += [torch.equal(outputs[0], expected[index])]
        alike += [torch.equal(one, other) for one, other in zip(outputs, launched[index], strict=True)]
    return alike


def replay_both(rank: int, buffers: HostBuffers, batch: int, heads: int, like: torch.Tensor) -> bool:
    """Whether inputs and heads have the bits of what was launched where they are replayed, twice."""
    layers, norms, sizes = layers_of(rank, buffers.lengths, batch, heads, like)

    def both() -> list[torch.Tensor]:
        how: Any = {"kernel": KERNELS["sdpa"].attend, "buffers": buffers}
        of_inputs = gather_through_host(layers, norms, 1e-6, sizes, **how)
        return [attend_through_host(*made_first(layers, norms), **how), of_inputs]

    launched = both()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        output = both()
    alike = True
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        alike &= all(torch.equal(*pair) for pair in zip(output, launched, strict=True))
    return alike
