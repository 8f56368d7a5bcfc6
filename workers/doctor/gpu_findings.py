"""Findings about the devices of a pool: GPUs, what lies between them, memory. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from parallel_runtime.said import said

from ..launch import PoolSpec
from .finding import GIB, Finding, count, gib, is_older
from .machine import Gpu, Link, Machine

_BUSY_BYTES = GIB
_SHM_BYTES = GIB // 2
_HOST_BYTES_PER_RANK = 2 * GIB


def find_on_cpu(spec: PoolSpec, machine: Machine) -> Iterator[Finding]:
    """A pool without GPUs."""
    if machine.problem is None and not machine.gpus and not machine.driver_gpus:
        yield Finding(
            "warning",
            "This machine has no GPU that torch can use: the pool computes on the CPU.",
            "That is good for trying the nodes out, and far too slow for work; run ComfyUI on a machine with GPUs.",
        )
    if spec.world_size > 1:
        yield Finding("note", "Several ranks on one CPU share its cores, so they are not faster than one.")


def find_in_gpus(spec: PoolSpec, machine: Machine) -> Iterator[Finding]:
    """The GPUs of a pool, and what is between them."""
    gpus = [gpu for gpu in machine.gpus if gpu.index in spec.devices]
    if len(gpus) == 1:
        whole = said("This machine has one GPU") if len(machine.gpus) == 1 else said("The pool has one GPU")
        yield Finding(
            "note",
            said(
                "{whole}: there is nothing to split; what makes one GPU faster is compile in Parallel Config.",
                whole=whole,
            ),
        )
    for gpu in gpus:
        yield from _find_in_gpu(gpu)
    yield from _find_unlike(gpus)
    links = [link for link in machine.links if {link.first, link.second} <= set(spec.devices)]
    yield from _find_in_links(links)
    if any(link.peer_access for link in links) and dict(machine.environment).get("NCCL_P2P_DISABLE", "0") != "0":
        yield Finding(
            "warning",
            "NCCL_P2P_DISABLE is set, so GPUs that could reach each other's memory exchange through the host's.",
            "Unset it, unless the check fails without it.",
        )


def _find_in_gpu(gpu: Gpu) -> Iterator[Finding]:
    if gpu.memory_used > _BUSY_BYTES:
        yield Finding(
            "warning",
            said(
                "Other processes use {gib} of GPU {index}'s {gib2}.",
                gib=gib(gpu.memory_used),
                index=gpu.index,
                gib2=gib(gpu.memory_total),
            ),
            "If that is ComfyUI or its pool, all is well; else close what nvidia-smi lists, or leave this GPU out.",
        )
    if is_older(gpu.capability, "8.0"):
        yield Finding(
            "warning",
            said(
                "GPU {index} ({name}, compute capability {capability}) is slow in bfloat16 or lacks it.",
                index=gpu.index,
                name=gpu.name,
                capability=gpu.capability,
            ),
            "Set weight_dtype to fp16 in Parallel Loader.",
        )


def _find_unlike(gpus: list[Gpu]) -> Iterator[Finding]:
    names = sorted({gpu.name for gpu in gpus})
    if len(names) > 1:
        yield Finding(
            "warning",
            said(
                "The GPUs are unlike ({names}): a picture is dealt out by their measured speed, but CFG branches "
                "and the pictures of a batch equally.",
                names=", ".join(names),
            ),
            "For those, compare with a pool of the fastest ones only, by naming them in devices.",
        )
    sizes = [gpu.memory_total for gpu in gpus]
    if sizes and max(sizes) > 1.1 * min(sizes):
        smallest = min(gpus, key=lambda gpu: gpu.memory_total)
        yield Finding(
            "warning",
            said(
                "The GPUs' memories differ: GPU {index} has {gib}, the largest has {gib2}.",
                index=smallest.index,
                gib=gib(smallest.memory_total),
                gib2=gib(max(sizes)),
            ),
            "Choose a model that fits the smallest, or leave that GPU out.",
        )


def _find_in_links(links: list[Link]) -> Iterator[Finding]:
    apart = [link for link in links if not link.peer_access]
    if apart:
        pairs = ", ".join(f"{link.first}-{link.second}" for link in apart)
        yield Finding(
            "warning",
            said(
                "GPUs without P2P: {pairs} cannot reach each other's memory, so everything that they exchange "
                "goes through the host's memory.",
                pairs=pairs,
            ),
            "Splitting the batch (CFG, data) exchanges next to nothing, and PipeFusion (stages, in Parallel Sampler) "
            "little; auto knows. Under a hypervisor, or with IOMMU or ACS on, P2P may only be switched off.",
        )
    elif any(link.kind is not None and not link.kind.startswith("NV") for link in links):
        yield Finding(
            "note", "Some GPUs are linked by PCIe only: the exchange of ulysses is slower than over NVLink (see Check)."
        )


def find_in_memory(spec: PoolSpec, machine: Machine) -> Iterator[Finding]:
    """Host memory and /dev/shm."""
    wanted = spec.world_size * _HOST_BYTES_PER_RANK
    if machine.memory_total and machine.memory_available < wanted:
        yield Finding(
            "warning",
            said(
                "{gib} of host memory is available, and {count} may take {gib2}.",
                gib=gib(machine.memory_available),
                count=count(spec.world_size, "rank"),
                gib2=gib(wanted),
            ),
            "Close other programs, or use fewer ranks.",
        )
    if spec.world_size > 1 and machine.shm_total and machine.shm_free < _SHM_BYTES:
        yield Finding(
            "warning",
            said(
                "/dev/shm has {shm_free} MiB left, and NCCL exchanges through it where GPUs have no P2P.",
                shm_free=machine.shm_free >> 20,
            ),
            "Start the container with --shm-size=1g or more, or empty /dev/shm.",
        )
