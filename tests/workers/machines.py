"""Machines for the doctor's tests, as facts."""

from __future__ import annotations

from dataclasses import replace

from workers.doctor.machine import OLDEST, Gpu, Link, Machine, Package
from workers.link_result import LinkCheck, Rates

GIB = 1 << 30


def gpu(index: int, name: str = "NVIDIA H200", total: int = 140 * GIB, used: int = 0, capability: str = "9.0") -> Gpu:
    """A GPU; what is not used is free."""
    return Gpu(index, name, total, total - used, used, capability)


def machine(*gpus: Gpu, peer_access: bool = True, kind: str | None = "NV18") -> Machine:
    """A sound machine with these GPUs, all of them linked alike."""
    numbers = range(len(gpus))
    return Machine(
        python="3.12.3",
        packages=tuple(Package(name, oldest) for name, oldest in OLDEST.items()),
        cuda="12.8" if gpus else None,
        nccl="2.27.5" if gpus else None,
        driver="570.86.15" if gpus else None,
        driver_gpus=len(gpus),
        gpus=gpus,
        links=tuple(Link(a, b, peer_access, kind) for a in numbers for b in numbers if a < b),
        memory_total=256 * GIB,
        memory_available=200 * GIB,
        shm_total=16 * GIB,
        shm_free=16 * GIB,
    )


def with_package(name: str, found: str | None, problem: str | None = None, base: Machine | None = None) -> Machine:
    """A machine, sound but for one package."""
    base = base or machine(gpu(0))
    changed = (Package(name, found, problem) if package.name == name else package for package in base.packages)
    return replace(base, packages=tuple(changed))


def passed(devices: str, ranks: int, rate: float = 350.0) -> LinkCheck:
    """A check that found everything right, both collectives at `rate` GB/s."""
    measured = (rate, rate) if ranks > 1 else (None, None)
    return LinkCheck(devices, (Rates("NCCL", ranks, 64, *measured, latency=20.0),), seconds=9.0)
