"""Machines for the doctor's tests, as facts."""

from __future__ import annotations

from dataclasses import replace

from workers.doctor.link_check import LinkCheck
from workers.doctor.machine import OLDEST, Link, Machine
from workers.driver import DriverGpu

GIB = 1 << 30


def gpu(index: int, name: str = "NVIDIA H200", used: int = 0, capability: str = "9.0") -> DriverGpu:
    """A GPU of 140 GiB."""
    return DriverGpu(index, f"uuid-{index}", name, 140 * GIB, used, "570.86.15", capability)


def machine(*gpus: DriverGpu, peer_access: bool = True, kind: str | None = "NVLink") -> Machine:
    """A sound machine with these GPUs, all of them linked alike."""
    numbers = range(len(gpus))
    return Machine(
        packages=dict(OLDEST),
        memory_total=256 * GIB,
        memory_available=200 * GIB,
        shm_free=16 * GIB,
        cuda="12.8" if gpus else None,
        nccl="2.27.5" if gpus else None,
        driver_gpus=gpus,
        gpus=gpus,
        links=tuple(Link(a, b, peer_access, kind) for a in numbers for b in numbers if a < b),
    )


def with_package(name: str, found: str | None, base: Machine | None = None) -> Machine:
    """A machine, sound but for one package."""
    base = base or machine(gpu(0))
    return replace(base, packages={**base.packages, name: found})


def passed(devices: str, rate: float = 350.0) -> LinkCheck:
    """A check that found everything right."""
    return LinkCheck(devices, "NCCL", 64, rate, 20.0)
