"""What Ulysses' exchange costs in a single block of FLUX.1-dev, alone and beside the block's products.

    torchrun --nproc-per-node 2 -m benchmarks.exchange_overlap --sizes 1024,2048

GPUs of one host that reach each other's memory. Each line is one thing that every rank does, 38 times (FLUX.1-dev's
single blocks) in a CUDA graph, in microseconds for one of them; exchanges end with the barrier that attention waits
for. A block's attention is measured without norms and rotary embedding, its first projection is left out.

The numbers in docs/performance.md are of an earlier form of this script, which called the same kernels and copies.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist

from parallel_runtime.acceleration import peer_exchange as peer
from parallel_runtime.acceleration.peer_memory import PeerMemory
from parallel_runtime.acceleration.rewrites import linear_gelu, linear_of_parts

from .kernel_times import milliseconds

HEADS, HEAD_DIM, WIDTH, TEXT, BLOCKS = 24, 128, 3072, 512, 38


@dataclass(frozen=True)
class Block:
    """What a rank has of a single block: queries, keys and values; the operator's `beside`; memory to group of it."""

    parts: list[torch.Tensor]
    layers: list[torch.Tensor]
    shared: tuple[torch.Tensor, torch.Tensor, torch.Tensor, str]

    def attend(self, beside: list[torch.Tensor]) -> torch.Tensor:
        """Attention over all ranks, and with `beside` the layers too."""
        parts = ([part] for part in self.parts)
        return cast(torch.Tensor, peer.attend_over_peers(*parts, [], 0.0, beside, *self.shared, "cudnn", None))


def build(tokens: int, memory: PeerMemory, device: torch.device, rank: int, ranks: int) -> Block:
    """Random tensors: tokens differ between ranks, weights do not."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    torch.manual_seed(1 + rank)
    own = tokens // ranks
    parts, x = [random(1, own, HEADS, HEAD_DIM) for _ in range(3)], random(1, own, WIDTH)
    torch.manual_seed(0)
    hidden, output = random(4 * WIDTH, WIDTH) / WIDTH**0.5, random(WIDTH, 5 * WIDTH) / (5 * WIDTH) ** 0.5
    buffers = memory.buffers((own,) * ranks, 1, HEADS, HEAD_DIM, torch.bfloat16, device)
    if buffers is None:
        raise SystemExit("These GPUs cannot reach each other's memory, so there is nothing to measure.")
    shared = (buffers.memory, buffers.shape, buffers.table, buffers.group)
    return Block(parts, [x, hidden, random(4 * WIDTH), output, random(WIDTH)], shared)


def subjects(block: Block, device: torch.device) -> dict[str, Callable[[], torch.Tensor | None]]:
    """What is measured, by its name in the table; the last two give the same output."""
    x, hidden_weight, hidden_bias, weight, bias = block.layers
    query, key, value = block.parts
    by_kernel, by_engines = (peer._Exchange.over([query], *block.shared, beside=staged) for staged in (False, True))
    staging = cast(torch.Tensor, by_engines.staging)
    half = replace(by_engines, staging=staging[:, : query.shape[1] // 2])

    def push() -> None:
        by_kernel.send_heads([query], [key], [value], [], 0.0)
        by_kernel.ranks.barrier(channel=0)

    def product() -> torch.Tensor:
        return linear_gelu(x, hidden_weight, hidden_bias)

    def beside_product(travel: Callable[[], None]) -> None:
        compute, links = torch.cuda.current_stream(), peer._links(device.index)
        links.wait_stream(compute)
        with torch.cuda.stream(links):
            travel()
        product()
        compute.wait_stream(links)

    def apart() -> torch.Tensor:
        return linear_of_parts([block.attend([]).flatten(2), product()], weight, bias)

    return {
        "exchange by a kernel": push,
        "exchange by copy engines, from the staging buffer": by_engines.move_heads,
        "the same with half of the bytes, as float8 would": half.move_heads,
        "feed-forward product": product,
        "feed-forward product beside copy engines": lambda: beside_product(by_engines.move_heads),
        "feed-forward product beside a kernel's exchange": lambda: beside_product(push),
        "attention and feed-forward, exchange before and after": apart,
        "attention and feed-forward, exchange beside": lambda: block.attend(block.layers),
    }


def microseconds(call: Callable[[], torch.Tensor | None]) -> tuple[float, torch.Tensor | None]:
    """Return the time of one of BLOCKS calls in a CUDA graph, and the last one's output. Collective."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    graph, output = torch.cuda.CUDAGraph(), None
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(BLOCKS):
            output = call()
    graph.replay()
    elapsed = milliseconds(graph.replay) * 1000 / BLOCKS
    return elapsed, None if output is None else output.clone()


@torch.no_grad()
def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1024,2048", help="pixels along a side of the picture")
    sizes = [int(size) for size in parser.parse_args().sizes.split(",")]
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, timeout=timedelta(seconds=60))
    assert dist.group.WORLD is not None
    memory = PeerMemory(dist.group.WORLD)
    for size in sizes:
        block = build((size // 16) ** 2 + TEXT, memory, device, rank, ranks)
        # Every rank goes through all of it, as each line is collective; rank 0 tells.
        measured = {name: microseconds(call) for name, call in subjects(block, device).items()}
        *_, (_, apart), (_, beside) = measured.values()
        apart, beside = cast(torch.Tensor, apart), cast(torch.Tensor, beside)
        error = ((beside - apart).float().norm() / apart.float().norm()).item()
        if rank == 0:
            sent = 3 * block.parts[0].nbytes * (ranks - 1) / ranks
            print(f"\n{ranks} GPUs, {size} x {size}: a rank sends {sent / 1e6:.1f} MB of query, key and value\n")
            print("| | µs |\n|---|---|")
            for name, (elapsed, _) in measured.items():
                print(f"| {name} | {elapsed:.1f} |")
            print(f"\nrelative difference of the last two's output: {error:.1e}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
