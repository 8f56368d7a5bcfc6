"""What ranks run of the tests of attention through the host's memory, on CPUs and on a GPU that they share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from parallel_runtime.acceleration.passes import linear_gelu, linear_of_parts, linear_silu_gate
from parallel_runtime.attention.kernels import KERNELS
from parallel_runtime.attention.over_ranks import WireLayout, ulysses_attention
from parallel_runtime.attention.projections import LinearLayer, Projections
from parallel_runtime.attention.rotary import whole_heads
from parallel_runtime.config import ParallelPlan
from parallel_runtime.exchange import grown_memory, head_routes, host_gather, host_lanes
from parallel_runtime.exchange.grown_memory import ExchangedHeads, HostMemory
from parallel_runtime.exchange.head_routes import HeadRoutes
from parallel_runtime.exchange.host_exchange import HostBuffers, attend_through_host
from parallel_runtime.exchange.host_gather import gather_through_host
from parallel_runtime.exchange.layer_beside import LayerBeside
from parallel_runtime.mesh.mesh import Groups, build_mesh
from parallel_runtime.networks import sequence_attention
from parallel_runtime.networks.diffusers.flux import FLUX
from parallel_runtime.networks.diffusers.parallel_transformer import parallelize
from parallel_runtime.streaming.share_memory import HostShare
from tests.parallel_runtime.flux_forward import build_transformer, run
from tests.parallel_runtime.polled_memory import PolledMemory

HEAD_DIM = 16


def layer_of(queries: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """What a layer beside attention of these parts (batch, own tokens, heads, head dim) is made of: with a GELU, or for
    an odd seed with a gate."""
    own = torch.cat(queries, 1)
    batch, tokens, heads, head_dim = own.shape
    inner, width = 40, 24
    generator = torch.Generator(own.device).manual_seed(seed)
    sizes = [(batch, tokens, width), (inner, width), (inner,), (width, heads * head_dim + inner), (width,)]
    if seed % 2:
        sizes = [sizes[0], (2 * inner, width), sizes[3]]
    return [torch.randn(size, device=own.device, generator=generator).to(own.dtype) for size in sizes]


def with_layer(rank: int, buffers: HostBuffers, batch: int, heads: int, like: torch.Tensor) -> float:
    """How far what a block makes of attended values and the layer beside them is from one after the other, of heads and
    where inputs are gathered."""
    layers, norms, sizes = layers_of(rank, buffers.lengths, batch, heads, like)
    given = layer_of(layers.whole()[0], rank)
    how: Any = {"kernel": KERNELS["sdpa"].attend, "buffers": buffers}
    made = made_first(layers, norms)
    ways = partial(attend_through_host, *made), partial(gather_through_host, layers, norms, 1e-6, sizes)
    found = []
    for way in ways:
        layer = LayerBeside(given)
        found.append(layer.end(way(**how, beside=layer).flatten(2)))
    attended = attend_through_host(*made, **how).flatten(2)
    gated = len(given) == 3
    hidden = linear_silu_gate(*given[:2]) if gated else linear_gelu(*given[:3])
    weight, bias = (given[2], None) if gated else given[3:]
    expected = linear_of_parts([attended, hidden], weight, bias)
    assert all(each.shape == expected.shape for each in found)
    if not expected.numel():
        return 0.0
    return max(float((each - expected).abs().max() / expected.abs().max()) for each in found)


def layers_of(
    rank: int, lengths: Sequence[int], batch: int, heads: int, like: torch.Tensor
) -> tuple[Projections, list[torch.Tensor], list[list[int]]]:
    """Layers that make a rank's queries, keys and values, of text and picture: one for all three, with a bias, and
    three; norms; tokens of both parts on each rank. `like` has head dim, dtype and device."""
    head_dim, width, size = like.shape[-1], 3 * like.shape[-1], heads * like.shape[-1]
    generator, shared = torch.Generator().manual_seed(heads + rank), torch.Generator().manual_seed(heads)
    texts = [min(length - 1, 2) for length in lengths]
    sizes = [texts, [length - text for length, text in zip(lengths, texts, strict=True)]]
    inputs = [torch.randn(batch, each[rank], width, generator=generator) for each in sizes]
    weights = [torch.randn(outputs, width, generator=shared) / width**0.5 for outputs in (3 * size, size, size, size)]
    biases = [torch.randn(3 * size, generator=shared), None, None, None]
    made_by = [
        LinearLayer(*(x if x is None else x.to(like) for x in each)) for each in zip(weights, biases, strict=True)
    ]
    places = [0, 0, 1, 0, 0, size, 2, 0, 0, 2 * size, 3, 0]
    angles = torch.randn(batch, lengths[rank], head_dim // 2, generator=generator).to(like.device)
    norms = [torch.rand(head_dim, generator=shared).to(like) for _ in range(4)]
    given = [x.to(like) for x in inputs]
    layers = Projections(given, [0, 1, 1, 1], made_by, places, heads, head_dim, like.dtype)
    return layers, [*norms, angles.cos(), angles.sin()], sizes


def made_first(layers: Projections, norms: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values of a rank's tokens."""
    return whole_heads(*layers.whole(), norms, 1e-6)


def gathered(rank: int, buffers: HostBuffers, batch: int, heads: int, like: torch.Tensor) -> float:
    """How far attention where inputs are gathered is from that of heads."""
    layers, norms, sizes = layers_of(rank, buffers.lengths, batch, heads, like)
    made, kernel = made_first(layers, norms), KERNELS["sdpa"].attend
    layout = layout_of(rank, buffers, made[0])
    expected = ulysses_attention(*made, kernel=kernel, group=dist.group.WORLD, layout=layout)
    found = gather_through_host(layers, norms, 1e-6, sizes, kernel=kernel, buffers=buffers)
    return float((found - expected).abs().max())


def layout_of(rank: int, buffers: HostBuffers, like: torch.Tensor) -> WireLayout | None:
    """How uneven lengths lie on the wire."""
    lengths = buffers.lengths
    return None if len(set(lengths)) == 1 else WireLayout.build(lengths, rank, like.device)


def both_ways(
    rank: int, buffers: HostBuffers, whole: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's attended values through the host's memory, and by collectives.

    Args:
        whole: (3, batch, tokens of all ranks, heads, head dim).
    """
    lengths, kernel = buffers.lengths, KERNELS["sdpa"].attend
    start = sum(lengths[:rank])
    own = whole[:, :, start : start + lengths[rank]]
    layout = layout_of(rank, buffers, whole)
    expected = ulysses_attention(*own, kernel=kernel, group=dist.group.WORLD, layout=layout, scale=scale)
    return attend_through_host(*own, kernel=kernel, buffers=buffers, scale=scale), expected


def cut_so(chunks: int, pieces: int) -> HostMemory:
    """Memory of all ranks, for heads in at most so many chunks and pieces."""
    memory = HostMemory(dist.group.WORLD)
    memory.chunks, memory.pieces = chunks, pieces
    return memory


def compare(rank: int, world_size: int, cases: list[list[Any]]) -> dict[str, Any]:
    """{"alike": whether each case (batch, heads, lengths, chunks, pieces, scale) has the bits of `ulysses_attention`,
    twice, "words": what words are left behind, "largest": difference to attention over all tokens on one rank, "beside"
    that of a layer beside it, "gathered" that of inputs}."""
    host_lanes.LEAST_MESSAGE = host_gather._LEAST_PIECE = 1
    grown_memory._LEAST = 1  # so inputs come in as many pieces as the room for messages asks for
    device, alike, largest, beside, inputs = torch.device("cpu"), [], 0.0, 0.0, 0.0
    grown_memory.StreamMemory = PolledMemory  # type: ignore[misc]
    memories = {(c, p): cut_so(c, p) for *_, c, p, _ in cases}
    for batch, heads, lengths, chunks, pieces, scale in cases:
        generator = torch.Generator().manual_seed(sum(lengths) + heads)
        whole = torch.randn(3, batch, sum(lengths), heads, HEAD_DIM, generator=generator)
        padded = -(-heads // world_size) * world_size
        buffers = memories[chunks, pieces].buffers(
            ExchangedHeads(tuple(lengths), batch, padded, HEAD_DIM, whole.dtype, device)
        )
        assert buffers is not None
        assert (len(buffers.chunks), buffers.pieces) == (min(chunks, padded // world_size), min(pieces, max(lengths)))
        for _ in range(2):
            found, expected = both_ways(rank, buffers, whole, scale)
            alike.append(torch.equal(found, expected))
        start = sum(lengths[:rank])
        of_one = KERNELS["math"].attend(*whole, None, scale)[:, start : start + lengths[rank]]
        largest = max(largest, float((found - of_one).abs().max()))
        if heads % world_size == 0:
            beside = max(beside, with_layer(rank, buffers, batch, heads, whole))
            inputs = max(inputs, gathered(rank, buffers, batch, heads, whole))
    dist.barrier()
    words = {word for memory in memories.values() for word in memory._memory.words()}  # type: ignore[union-attr]
    return {"alike": alike, "words": sorted(words), "largest": largest, "beside": beside, "gathered": inputs}


def grow(rank: int, world_size: int) -> dict[str, Any]:
    """What becomes of memory that must grow, that one rank cannot make or open, and that is let go."""
    device, dtype = torch.device("cpu"), torch.float32
    failing = {"open": False}

    def opened(share: HostShare, *place: Any) -> PolledMemory:
        if failing["open"] and rank == 1:
            raise RuntimeError("no")
        return PolledMemory(share, *place)

    grown_memory.StreamMemory = opened  # type: ignore[assignment,misc]
    memory = cut_so(2, 1)

    def ask(tokens: int) -> bool:
        lengths = (tokens,) * world_size
        return memory.buffers(ExchangedHeads(lengths, 1, 2 * world_size, HEAD_DIM, dtype, device)) is not None

    found: dict[str, Any] = {"small": ask(8), "again": ask(9), "made once": memory.made == 1}
    first = memory._size
    failing["open"] = True
    found["refused"] = not ask(2**17)
    found["what is there still serves"] = ask(10) and memory._size == first
    failing["open"] = False
    found["not asked again for so much"] = not ask(2**17) and memory.made == 1
    memory.free()
    room, grown_memory.room_on_host = grown_memory.room_on_host, lambda: 0 if rank == 0 else 2**60
    found["no room on the first rank"] = not ask(8)
    memory.free()
    grown_memory.room_on_host = room
    found["made again, and larger"] = ask(2**17) and memory._size > first and memory.made == 2
    return found


def forwards(rank: int, world_size: int, cases: list[list[Any]]) -> dict[str, Any]:
    """{"alike": whether a network's forwards have the bits of those over collectives, "attended": attentions that
    went through the host, "in chunks": whether these were cut}."""
    host_lanes.LEAST_MESSAGE = 1
    head_routes.may_go_through_host = lambda device: True
    grown_memory.StreamMemory = PolledMemory  # type: ignore[misc]
    went: list[bool] = []

    def attend(*parts: torch.Tensor, **how: Any) -> torch.Tensor:
        went.append(len(how["buffers"].chunks) > 1 or parts[0].shape[2] <= world_size)
        return attend_through_host(*parts, **how)

    sequence_attention.attend_through_host = attend
    plan = ParallelPlan(ulysses=world_size)
    meshes = [
        build_mesh(plan, rank, world_size, groups=Groups(rank, world_size, share)) for share in (None, HeadRoutes)
    ]
    alike = []
    for heads in (2 * world_size, 2 * world_size + 1):
        transformer = parallelize(build_transformer(heads=heads), FLUX, meshes[0])
        for image, text, batch in cases:
            outputs = []
            for mesh in meshes:
                transformer.set_mesh(mesh)
                outputs.append(run(transformer, image, text, batch))
            alike.append(torch.equal(*outputs))
    dist.barrier()
    return {"alike": alike, "attended": len(went), "in chunks": all(went)}
