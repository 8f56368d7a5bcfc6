"""The machine as the doctor finds it: packages, GPUs, links, memory.

The facts are read in a process of their own (`python -m workers.doctor.machine`, JSON on its output): a driver that
hangs or crashes then takes nobody along, and what reading costs in GPU memory is given back.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from parallel_runtime.errors import PoolError

from ..launch import PACK_ROOT
from ..leftovers import private_folder
from .driver import DriverGpu, find_links, find_trouble, list_gpus

OLDEST = {
    "torch": "2.6",
    "diffusers": "0.42",
    "yunchang": "0.6.4",
    "safetensors": "0.4.3",
    "msgspec": "0.18",
    "psutil": "5.9",
    "packaging": "21.0",
    "nvidia-ml-py": "12.535.77",
}
"""Oldest version of each package that is supported."""
_MODULES = {"nvidia-ml-py": "pynvml"}
"""Packages that are imported under another name."""

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
    command = [sys.executable, "-m", "workers.doctor.machine"]
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
    memory: dict[str, Any] = {**_find_memory()}
    machine = Machine(
        python=platform.python_version(),
        packages=tuple(packages),
        driver=driver_gpus[0].driver if driver_gpus else None,
        driver_gpus=len(driver_gpus),
        environment=_find_environment(),
        **memory,
    )
    return machine, driver_gpus


def _find_package(name: str) -> Package:
    try:
        found = version(name)
    except PackageNotFoundError:
        return Package(name, None)
    try:
        module = importlib.import_module(_MODULES.get(name, name))
        if name == "diffusers":
            from parallel_runtime.networks.diffusers.registry import MODELS

            getattr(module, MODELS[0].transformer_class)  # diffusers imports its classes when they are first asked for
    except Exception as error:  # noqa: BLE001 - a package may raise anything while it is imported; the report says it
        return Package(
            name, found, f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        )
    return Package(name, found)


def _find_gpus(driver_gpus: tuple[DriverGpu, ...]) -> tuple[tuple[Gpu, ...], dict[int, int]]:
    """The GPUs that CUDA sees, and each one's number in the driver's count."""
    import torch

    by_uuid = {gpu.uuid: gpu for gpu in driver_gpus}
    gpus, driver_index = [], {}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        uuid = str(getattr(properties, "uuid", ""))
        known = by_uuid.get(uuid)
        if known is not None:
            driver_index[index] = known.index
        used = known.memory_used if known is not None else total - free
        capability = f"{properties.major}.{properties.minor}"
        gpus.append(Gpu(index, properties.name, total, free, used, capability, uuid))
    return tuple(gpus), driver_index


def _find_links(driver_index: Mapping[int, int], count: int) -> tuple[Link, ...]:
    import torch

    kinds = find_links() if count > 1 else {}
    reach = torch.cuda.can_device_access_peer
    return tuple(
        Link(
            first,
            second,
            reach(first, second) and reach(second, first),
            kinds.get((driver_index.get(first, -1), driver_index.get(second, -1))),
        )
        for first in range(count)
        for second in range(first + 1, count)
    )


def _find_cuda(driver_gpus: tuple[DriverGpu, ...]) -> dict[str, Any]:
    """What needs an importable torch."""
    import torch

    facts: dict[str, Any] = {"cuda": torch.version.cuda}
    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        if complaints:
            facts["gpu_problem"] = str(complaints[0].message).strip().splitlines()[0].rstrip(".")
        return facts
    with contextlib.suppress(RuntimeError, AttributeError, ImportError):  # a build without NCCL
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    try:
        facts["gpus"], driver_index = _find_gpus(driver_gpus)
        facts["links"] = _find_links(driver_index, len(facts["gpus"]))
    except RuntimeError as error:
        facts["problem"] = f"CUDA failed when it was asked about the GPUs: {str(error).splitlines()[0]}"
    return facts


def _find_memory() -> dict[str, int]:
    facts: dict[str, int] = {}
    with contextlib.suppress(ImportError):
        import psutil

        memory = psutil.virtual_memory()
        facts |= {"memory_total": memory.total, "memory_available": memory.available}
    with contextlib.suppress(OSError):
        shm = os.statvfs("/dev/shm")
        facts |= {"shm_total": shm.f_blocks * shm.f_frsize, "shm_free": shm.f_bavail * shm.f_frsize}
    return facts


def _find_environment() -> tuple[tuple[str, str], ...]:
    names = sorted(name for name in os.environ if name.startswith(_SHOWN_VARIABLES) and name != _NOT_SHOWN)
    return tuple((name, os.environ[name]) for name in names)


def _gather() -> Machine:
    driver_gpus = list_gpus()  # before torch takes GPU memory for itself
    packages = tuple(_find_package(name) for name in OLDEST)
    torch_works = packages[0].found is not None and packages[0].problem is None
    facts: dict[str, Any] = {"gpu_problem": None if driver_gpus else find_trouble(), **_find_memory()}
    if torch_works:
        facts |= _find_cuda(driver_gpus)
    return Machine(
        python=platform.python_version(),
        packages=packages,
        driver=driver_gpus[0].driver if driver_gpus else None,
        driver_gpus=len(driver_gpus),
        environment=_find_environment(),
        **facts,
    )


def main() -> None:
    """Process entry: one line of JSON on the output; whatever packages print while they are imported goes elsewhere."""
    with contextlib.suppress(ImportError):  # psutil is missing, which the report says
        from ..processes import die_with_parent

        die_with_parent(os.getppid())
    with contextlib.redirect_stdout(sys.stderr):
        machine = _gather()
    print(json.dumps(asdict(machine)))


if __name__ == "__main__":
    main()
