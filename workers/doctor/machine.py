"""The machine as the doctor finds it: packages, GPUs, links, memory. A process of its own (gathering.py) looks."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from parallel_runtime.errors import PoolError

from ..launch import PACK_ROOT
from ..leftovers import private_folder
from .driver import DriverGpu, list_gpus

OLDEST = {
    "torch": "2.6",
    "diffusers": "0.42",
    "safetensors": "0.4.3",
    "msgspec": "0.18",
    "psutil": "5.9",
    "packaging": "20.0",
    "nvidia-ml-py": "12.535.77",
}
"""Oldest version of each package that is supported."""
OF_COMFYUI = ("torch", "safetensors", "psutil")
"""Those that ComfyUI brings: an install for this pack must never replace them."""
EXTRAS = ("diffusers",)
"""Those without which the pack does all but run diffusers' classes."""
_SHOWN_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NCCL_")
_NOT_SHOWN = "NCCL_VERSION"  # container images note in it what they were built with; NCCL does not read it


@dataclass(frozen=True)
class Package:
    """A Python package: its version (None: missing) and why it does not import, if it does not."""

    name: str
    found: str | None
    problem: str | None = None


@dataclass(frozen=True)
class Gpu:
    """A GPU as CUDA counts it; memory in bytes.

    Args:
        memory_used: what other processes held before the doctor looked.
        capability: compute capability, such as "9.0".
        uuid: without the prefix "GPU-"; "" where torch does not tell it.
    """

    index: int
    name: str
    memory_total: int
    memory_free: int
    memory_used: int
    capability: str
    uuid: str = ""


@dataclass(frozen=True)
class Link:
    """Between two GPUs. `peer_access`: each reaches the other's memory; `kind`: see `find_links`, None unknown."""

    first: int
    second: int
    peer_access: bool
    kind: str | None = None


@dataclass(frozen=True)
class Machine:
    """Facts, without a verdict; memory in bytes.

    Args:
        problem: why (some of) the facts could not be read, a sentence without its full stop.
        gpu_problem: what the driver or CUDA complained about, likewise.
        driver_gpus: GPUs that the driver lists, of which CUDA may see fewer.
        environment: variables that change what CUDA and NCCL do.
    """

    python: str
    packages: tuple[Package, ...] = ()
    cuda: str | None = None
    nccl: str | None = None
    driver: str | None = None
    driver_gpus: int = 0
    gpus: tuple[Gpu, ...] = ()
    links: tuple[Link, ...] = ()
    memory_total: int = 0
    memory_available: int = 0
    shm_total: int = 0
    shm_free: int = 0
    environment: tuple[tuple[str, str], ...] = ()
    problem: str | None = None
    gpu_problem: str | None = None

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Machine:
        """Inverse of `dataclasses.asdict`, after JSON."""
        return cls(
            **{
                **values,
                "packages": tuple(Package(**package) for package in values["packages"]),
                "gpus": tuple(Gpu(**gpu) for gpu in values["gpus"]),
                "links": tuple(Link(**link) for link in values["links"]),
                "environment": tuple((name, value) for name, value in values["environment"]),
            }
        )

    def package(self, name: str) -> Package | None:
        """A package that was looked for."""
        return next((package for package in self.packages if package.name == name), None)


def read_machine(limit_seconds: float) -> Machine:
    """Read the facts in a process of their own; what went wrong is in `problem`."""
    command = [sys.executable, "-m", "workers.doctor.gathering"]
    try:
        # Packages make folders for their caches when they are imported, which shall go with ours.
        with private_folder() as folder:
            environment = os.environ | {"TMPDIR": str(folder)}
            done = subprocess.run(
                command,
                cwd=PACK_ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=limit_seconds,
            )
    except (OSError, PoolError) as error:
        return Machine(platform.python_version(), problem=f"Reading the machine's facts could not start: {error}")
    except subprocess.TimeoutExpired:
        problem = f"Reading the machine's facts took more than {limit_seconds:.0f} seconds; most often a GPU hangs"
        return Machine(platform.python_version(), problem=problem)
    if done.returncode != 0:
        said = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "nothing")
        problem = (
            f"The process that reads the machine's facts ended with code {done.returncode} and said: {said.strip()}"
        )
        return Machine(platform.python_version(), problem=problem)
    return Machine.from_mapping(json.loads(done.stdout.splitlines()[-1]))


def first_look() -> tuple[Machine, tuple[DriverGpu, ...]]:
    """What is known at once, without torch: versions, the driver's GPUs, memory. No package is imported."""
    driver_gpus = list_gpus()
    packages = []
    for name in OLDEST:
        try:
            packages.append(Package(name, version(name)))
        except PackageNotFoundError:
            packages.append(Package(name, None))
    memory: dict[str, Any] = {**find_memory()}
    machine = Machine(
        python=platform.python_version(),
        packages=tuple(packages),
        driver=driver_gpus[0].driver if driver_gpus else None,
        driver_gpus=len(driver_gpus),
        environment=find_environment(),
        **memory,
    )
    return machine, driver_gpus


def find_memory() -> dict[str, int]:
    """Of the host and of /dev/shm, in bytes, as fields of Machine."""
    facts: dict[str, int] = {}
    with contextlib.suppress(ImportError):
        import psutil

        memory = psutil.virtual_memory()
        facts |= {"memory_total": memory.total, "memory_available": memory.available}
    with contextlib.suppress(OSError):
        shm = os.statvfs("/dev/shm")
        facts |= {"shm_total": shm.f_blocks * shm.f_frsize, "shm_free": shm.f_bavail * shm.f_frsize}
    return facts


def find_environment() -> tuple[tuple[str, str], ...]:
    """Variables that change what CUDA and NCCL do."""
    names = sorted(name for name in os.environ if name.startswith(_SHOWN_VARIABLES) and name != _NOT_SHOWN)
    return tuple((name, os.environ[name]) for name in names)
