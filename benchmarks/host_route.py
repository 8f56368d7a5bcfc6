"""Attention over GPUs without peer access: through the host's memory in chunks, beside NCCL and beside one rank.

    NCCL_P2P_DISABLE=1 torchrun --nproc-per-node 2 -m benchmarks.host_route [--trace FOLDER]

Rates are of bytes that each rank sends, all ranks at once, which as many bytes come against: a plain copy to and from
pinned memory, the route with attention taken away, NCCL's all-to-all of the same bytes. Times are of one attention,
the slowest rank's. "4 × 2": four chunks of heads, each in two pieces. Behind them the same with the layers that make
queries, keys and values, at 4 × 4. Ranks may share one GPU, where gloo stands for NCCL: that shows bits, and no rate
of a link.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallel_runtime.attention.choice import resolve_kernel
from parallel_runtime.attention.kernels import KERNELS
from parallel_runtime.attention.over_ranks import WireLayout, ulysses_attention
from parallel_runtime.attention.projections import LinearLayer, Projections
from parallel_runtime.attention.rotary import apply_norms
from parallel_runtime.exchange.grown_memory import ExchangedHeads, HostMemory
from parallel_runtime.exchange.host_exchange import HostBuffers, attend_through_host
from parallel_runtime.exchange.host_gather import gather_through_host

WAYS = ((1, 1), (2, 4), (4, 1), (4, 2), (4, 4), (8, 4))
"""Chunks of heads, and pieces of a chunk."""
_DTYPE = torch.bfloat16
_SECONDS = 0.5
"""About how long a call is repeated."""


@dataclass(frozen=True)
class Shape:
    """An attention.

    Args:
        tokens: of all ranks.
    """

    name: str
    tokens: int
    heads: int
    head_dim: int = 128


SHAPES = (Shape("FLUX.1, 1024²", 4608, 24), Shape("Wan 14B, 480p, 81 frames", 32760, 40))


@dataclass(frozen=True)
class Case:
    """A shape on this rank, with what is common to all ways."""

    shape: Shape
    rank: int
    lengths: tuple[int, ...]
    device: torch.device
    own: tuple[torch.Tensor, ...]
    kernel: Any

    @property
    def sent_bytes(self) -> float:
        """By this rank: queries, keys, values and attended values, but for its own heads."""
        degree = len(self.lengths)
        return 4 * self.own[0].nbytes * (degree - 1) / degree

    def buffers(self, chunks: int, pieces: int) -> HostBuffers:
        """How it goes through the host's memory; memory of its own for each."""
        degree = len(self.lengths)
        heads = -(-self.shape.heads // degree) * degree
        memory = HostMemory(world())
        memory.chunks, memory.pieces = chunks, pieces
        buffers = memory.buffers(ExchangedHeads(self.lengths, 1, heads, self.shape.head_dim, _DTYPE, self.device))
        if buffers is None:
            raise SystemExit("The ranks share no memory of the host; the log says why.")
        return buffers

    def through_host(self, buffers: HostBuffers, kernel: Any = None) -> torch.Tensor:
        """This rank's attended values."""
        return attend_through_host(*self.own, kernel=kernel or self.kernel, buffers=buffers)

    def projected(self) -> tuple[Projections, list[torch.Tensor]]:
        """A layer that makes this rank's queries, keys and values, and their norms."""
        shape, own = self.shape, self.lengths[self.rank]
        size = shape.heads * shape.head_dim
        x = torch.randn(1, own, size, device=self.device).to(_DTYPE)
        alike = torch.Generator(self.device).manual_seed(0)  # on all ranks
        layer = LinearLayer(torch.randn(3 * size, size, device=self.device, generator=alike).to(_DTYPE) / size**0.5)
        places = [0, 0, 0, size, 0, 2 * size]
        angles = torch.randn(own, shape.head_dim // 2, device=self.device)
        norms = [torch.ones(2, shape.head_dim, device=self.device, dtype=_DTYPE)[row] for row in range(2)]
        layers = Projections([x], [0], [layer], places, shape.heads, shape.head_dim, _DTYPE)
        return layers, [*norms, angles.cos(), angles.sin()]

    def by_collectives(self, layout: WireLayout | None) -> torch.Tensor:
        """The same by NCCL."""
        return ulysses_attention(*self.own, kernel=self.kernel, group=world(), layout=layout)

    def all_alone(self) -> Callable[[], torch.Tensor]:
        """Attention over all tokens with all heads, by this rank."""
        size = 3, 1, self.shape.tokens, self.shape.heads, self.shape.head_dim
        whole = torch.randn(size, device=self.device).to(_DTYPE).unbind(0)
        return lambda: self.kernel(*whole, None, None)


def world() -> dist.ProcessGroup:
    """The group of all ranks."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def open_case(shape: Shape, rank: int, degree: int, device: torch.device) -> Case:
    """The shape's random tensors, each rank's share of them."""
    base, more = divmod(shape.tokens, degree)
    lengths = tuple(base + (index < more) for index in range(degree))
    generator = torch.Generator(device).manual_seed(rank)
    size = 3, 1, lengths[rank], shape.heads, shape.head_dim
    own = tuple(torch.randn(size, device=device, generator=generator).to(_DTYPE).unbind(0))
    kernel = KERNELS[resolve_kernel("auto", device, _DTYPE, shape.head_dim)].attend
    return Case(shape, rank, lengths, device, own, kernel)


def slowest(value: float) -> float:
    """The largest of all ranks' values."""
    told = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return float(told)


def milliseconds(call: Callable[[], Any]) -> float:
    """Of a call that is repeated without waiting, on the slowest rank; equally often on all."""
    repeats = 3
    for _ in range(2):
        torch.cuda.synchronize()
        dist.all_reduce(torch.zeros(1))
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
        each = slowest((time.perf_counter() - started) / repeats)
        repeats = max(3, min(200, int(_SECONDS / each)))
    return each * 1e3


def recorded(call: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """(replay, output) of a call as a CUDA graph."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        output = call()
    return graph.replay, output


def plain_copies(size: int, device: torch.device) -> float:
    """Milliseconds of so many bytes to pinned memory and as many from it at once."""
    out, back = torch.cuda.Stream(device), torch.cuda.Stream(device)
    there, here = torch.zeros(2, size, dtype=torch.uint8, pin_memory=True).unbind(0)
    sent, received = torch.zeros(2, size, dtype=torch.uint8, device=device).unbind(0)

    def both() -> None:
        with torch.cuda.stream(out):
            there.copy_(sent, non_blocking=True)
        with torch.cuda.stream(back):
            received.copy_(here, non_blocking=True)

    return milliseconds(both)


def value_alone(query: Any, key: Any, value: torch.Tensor, mask: Any, scale: Any) -> torch.Tensor:
    """In the place of attention: nothing is computed, as much travels."""
    return value


def all_to_all(case: Case) -> float:
    """Milliseconds of NCCL's exchange of the same bytes, there and back."""
    numbers = max(case.lengths) * case.shape.heads * case.shape.head_dim // len(case.lengths) * len(case.lengths)
    pairs = [torch.zeros(2, part * numbers, device=case.device, dtype=_DTYPE).unbind(0) for part in (3, 1)]

    def there_and_back() -> None:
        for sent, received in pairs:
            dist.all_to_all_single(received, sent)

    return milliseconds(there_and_back)


def measure(case: Case, nccl: bool, say: Callable[[str], None], trace: Path | None) -> None:
    """All ways of one shape."""
    shape, degree = case.shape, len(case.lengths)
    say(f"\n{shape.name}: {shape.tokens} tokens, {shape.heads} × {shape.head_dim}, {degree} ranks")
    rates = {"plain copies, out and in at once": plain_copies(int(case.sent_bytes), case.device)}
    rates["NCCL all-to-all" if nccl else "gloo all-to-all"] = all_to_all(case)
    ways = {f"{way[0]} × {way[1]}": case.buffers(*way) for way in WAYS}
    for way, buffers in ways.items():
        call = partial(case.through_host, buffers, value_alone)
        rates[f"the route, {way}, no attention"] = milliseconds(call)
    for name, took in rates.items():
        say(f"  {name:40} {took:8.3f} ms  {case.sent_bytes / took / 1e6:6.1f} GB/s each way")
    layout = WireLayout.build(case.lengths, case.rank, case.device) if len(set(case.lengths)) > 1 else None
    say(f"  {'one rank, all heads':40} {milliseconds(case.all_alone()):8.3f} ms")
    ulysses = partial(case.by_collectives, layout)
    expected = ulysses()
    took = milliseconds(ulysses)
    graphed = milliseconds(recorded(ulysses)[0]) if nccl else float("nan")
    name = f"Ulysses by {'NCCL' if nccl else 'gloo'}"
    say(f"  {name:40} {took:8.3f} ms  in a graph {graphed:8.3f} ms")
    for way, buffers in ways.items():
        call = partial(case.through_host, buffers)
        apart = slowest(float((call().float() - expected.float()).abs().max()))
        took = milliseconds(call)
        replay, output = recorded(call)
        graphed = milliseconds(replay)
        apart = max(apart, slowest(float((output.float() - expected.float()).abs().max())))
        name = f"the route, {way}"
        say(f"  {name:40} {took:8.3f} ms  in a graph {graphed:8.3f} ms  apart by {apart:g} (0 expected)")
        if trace is not None:
            keep_trace(call, trace / f"{shape.heads}x{shape.tokens}-{way.replace(' × ', 'x')}-rank{case.rank}.json")


def measure_layers(case: Case, say: Callable[[str], None], trace: Path | None) -> None:
    """What makes heads and the exchange together: one after the other, and by inputs."""
    (layers, norms), how = case.projected(), {"kernel": case.kernel, "buffers": case.buffers(4, 4)}

    def before() -> torch.Tensor:
        queries, keys, values = layers.whole()
        return attend_through_host(*apply_norms(queries, keys, norms, 1e-6), *values, **how)

    ways: dict[str, Callable[[], torch.Tensor]] = {
        "layers, then heads": before,
        "inputs, layers there": partial(gather_through_host, layers, norms, 1e-6, [case.lengths], **how),
    }
    expected = before()
    for name, call in ways.items():
        apart = slowest(float((call().float() - expected.float()).abs().max()))
        took = milliseconds(call)
        replay, _output = recorded(call)
        graphed = milliseconds(replay)
        say(f"  {name:40} {took:8.3f} ms  in a graph {graphed:8.3f} ms  apart by {apart:g}")
        if trace is not None:
            keep_trace(replay, trace / f"{name.replace(',', '').replace(' ', '-')}-rank{case.rank}.json")


def keep_trace(call: Callable[[], Any], path: Path) -> None:
    """Write what the GPU does in two calls, for a browser's trace viewer."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorder:
        for _ in range(2):
            call()
        torch.cuda.synchronize()
    path.parent.mkdir(parents=True, exist_ok=True)
    recorder.export_chrome_trace(str(path))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="a folder for traces of each way")
    parser.add_argument("--shape", type=int, choices=range(len(SHAPES)), help="one of the shapes alone")
    given = parser.parse_args()
    rank, degree = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    nccl = torch.cuda.device_count() >= degree
    device = torch.device("cuda", rank if nccl else 0)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if nccl else "gloo")

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    say(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    say(f"NCCL_P2P_DISABLE={os.environ.get('NCCL_P2P_DISABLE', '')}")
    for shape in SHAPES if given.shape is None else [SHAPES[given.shape]]:
        case = open_case(shape, rank, degree, device)
        measure(case, nccl, say, given.trace)
        measure_layers(case, say, given.trace)
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
