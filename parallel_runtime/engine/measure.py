"""Measuring what plans reckon with: the GPU's sustained rates and the links. Collective; the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ..attention.choice import resolve_kernel
from ..attention.kernels import KERNELS
from ..exchange.grown_memory import ExchangedHeads, HostMemory
from ..exchange.head_routes import may_go_through_host
from ..exchange.host_exchange import attend_through_host
from ..gpu_memory.cuda_driver import pinned
from ..mesh.speeds import gather_from_ranks, seconds_of
from ..requests.facts import HOST_MEMORY, NVLINK, LinkFacts, MachineFacts

_WARM_SECONDS = 0.25  # a GPU at its power limit slows down within a tenth of a second; a step lasts longer than that
_TIMED_SECONDS = 0.1
_SHAPE = (4096, 3072, 12288, 24)  # tokens, width, width of the MLP, heads: FLUX.1's
_LONGER = 8
_NEEDED_BYTES = 2**30
_EXCHANGED = 8_000_000  # numbers of a timed exchange, 32 MB in float32: about what a FLUX.1 block of 1024 × 1024 sends

_COPIED, _COPIES = 64 << 20, 16
"""Bytes of a timed copy from the host, about those of a small block, and how many are timed: 20 ms at 54 GB/s."""


def measure_machine(assumed: MachineFacts, device: torch.device, world_size: int) -> MachineFacts:
    """Measure every rank's GPU and the links between them; about a second. Collective over the default group. The
    slowest rank's numbers count, and the facts are the same on every rank, as each gets all numbers before it chooses.
    Nothing is measured on the CPU, nor where a GPU has less than 1 GiB left."""
    if device.type != "cuda" or not assumed.on_gpu:
        return assumed
    if min(gather_from_ranks([float(torch.cuda.mem_get_info(device)[0])], world_size))[0] < _NEEDED_BYTES:
        return assumed
    matmul, attention, elementwise = map(min, zip(*gather_from_ranks(_gpu_rates(device), world_size), strict=True))
    facts = replace(assumed, matmul=matmul, attention=attention, memory_rate=elementwise, measured=True)
    facts = replace(facts, host_rate=measure_host(device, world_size))
    if world_size > 1 and facts.network is not None:
        facts = replace(facts, network=measure_link(device, world_size, facts.network))
    elif world_size > 1:
        link = measure_link(device, world_size, facts.link)
        if link.name == HOST_MEMORY.name and may_go_through_host(device):
            link = replace(link, route=measure_route(device, world_size))
        facts = replace(facts, link=link)
    torch.cuda.empty_cache()
    return facts


def measure_link(device: torch.device, world_size: int, assumed: LinkFacts) -> LinkFacts:
    """Time an all-to-all, a tiny one, and a step of a ring over all ranks. Collective over the default group."""
    count = _EXCHANGED // world_size * world_size
    sent, received = torch.zeros(2, count, device=device).unbind(0)
    tiny, tiny_received = torch.zeros(2, world_size, device=device).unbind(0)
    exchange = _seconds(lambda: dist.all_to_all_single(received, sent), device)
    latency = _seconds(lambda: dist.all_to_all_single(tiny_received, tiny), device)
    rank = dist.get_rank()

    def pass_on() -> None:
        there = dist.P2POp(dist.isend, sent, (rank + 1) % world_size)
        back = dist.P2POp(dist.irecv, received, (rank - 1) % world_size)
        for work in dist.batch_isend_irecv([there, back]):
            work.wait()

    seconds = [exchange, latency, _seconds(pass_on, device)]
    exchange, latency, passed = (max(numbers) for numbers in zip(*gather_from_ranks(seconds, world_size), strict=True))
    if assumed.name == NVLINK.name:
        # Ulysses writes to its peers' memory there (exchange/peer_exchange.py) instead of waiting for NCCL.
        latency = min(latency, NVLINK.latency)
    outside = sent.nbytes * (world_size - 1) / world_size
    return LinkFacts(assumed.name, outside / exchange / 1e9, latency, sent.nbytes / passed / 1e9, measured=True)


def measure_route(device: torch.device, world_size: int) -> float:
    """10^9 bytes per second that the slowest rank sends, and receives at once, by our own way through the host's
    memory, with nothing to attend; 0 where ranks share none. Collective over the default group."""
    group = dist.group.WORLD
    assert group is not None
    tokens, width, _, heads = _SHAPE
    head_dim = width // heads
    heads = heads // world_size * world_size or world_size
    tokens *= _LONGER  # replayed in a recording, shorter ones take as long as they travel; launched they do not
    own = torch.zeros(1, tokens // world_size, heads, head_dim, device=device, dtype=torch.bfloat16)
    lengths = (own.shape[1],) * world_size
    buffers = HostMemory(group).buffers(ExchangedHeads(lengths, 1, heads, own.shape[3], own.dtype, device))
    if buffers is None:
        return 0.0

    def travel() -> None:
        # In the place of attention nothing is computed, and as much travels.
        attend_through_host(own, own, own, kernel=lambda query, key, value, mask, scale: value, buffers=buffers)

    seconds = _seconds(travel, device)
    sent = 4 * own.nbytes * (world_size - 1) / world_size
    return sent / max(slowest for (slowest,) in gather_from_ranks([seconds], world_size)) / 1e9


def measure_host(device: torch.device, world_size: int) -> float:
    """Time copies from pinned memory of the host, on all ranks at once: GPUs may share a switch, and share that memory.
    10^9 bytes per second of the slowest; 0 where one has no such memory. Collective over the default group."""
    host, target = torch.ones(_COPIED, dtype=torch.uint8), torch.empty(_COPIED, dtype=torch.uint8, device=device)
    with pinned(host) if device.type == "cuda" else nullcontext(True) as fast:
        gather_from_ranks([0.0], world_size)  # they begin together
        seconds = seconds_of(lambda: target.copy_(host, non_blocking=True), _COPIES, device)
    own = host.nbytes / seconds / 1e9 if fast else 0.0
    return min(rate for (rate,) in gather_from_ranks([own], world_size))


def _gpu_rates(device: torch.device) -> list[float]:
    """TFLOP/s of a product and of attention in FLUX.1's shapes, GB/s of an elementwise kernel."""
    dtype = torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    tokens, width, hidden, heads = _SHAPE
    x = torch.randn(tokens, width, device=device, dtype=dtype)
    weight = torch.randn(hidden, width, device=device, dtype=dtype)
    product = 2 * tokens * width * hidden / _sustained(lambda: F.linear(x, weight), device)
    query = x.view(1, tokens, heads, -1)
    kernel = KERNELS[resolve_kernel("auto", device, dtype, query.shape[-1])]
    attention = 4 * tokens**2 * width / _sustained(lambda: kernel.attend(query, query, query, None, None), device)
    large = torch.zeros(64 * 2**20, device=device, dtype=dtype)
    elementwise = 2 * large.nbytes / _sustained(lambda: large.add_(1), device)
    return [product / 1e12, attention / 1e12, elementwise / 1e9]


def _sustained(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, after the GPU has been busy with it for a while."""
    once = seconds_of(work, 3, device)
    seconds_of(work, max(1, int(_WARM_SECONDS / once)), device)
    return seconds_of(work, max(1, int(_TIMED_SECONDS / once)), device)


def _seconds(collective: Callable[[], object], device: torch.device) -> float:
    """Seconds of one of many collectives; equally many on every rank."""
    seconds_of(collective, 5, device)
    return seconds_of(collective, 20, device)
