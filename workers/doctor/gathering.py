"""Reads the machine's facts: `python -m workers.doctor.gathering`, JSON on its output.

In a process of its own: a driver that hangs or crashes then takes nobody along, and what reading costs in GPU memory
is given back.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
import sys
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from .driver import DriverGpu, find_links, find_trouble, list_gpus
from .machine import OLDEST, Gpu, Link, Machine, Package, find_environment, find_memory

_MODULES = {"nvidia-ml-py": "pynvml"}
"""Packages that are imported under another name."""


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


def _gather() -> Machine:
    driver_gpus = list_gpus()  # before torch takes GPU memory for itself
    packages = tuple(_find_package(name) for name in OLDEST)
    torch_works = packages[0].found is not None and packages[0].problem is None
    facts: dict[str, Any] = {"gpu_problem": None if driver_gpus else find_trouble(), **find_memory()}
    if torch_works:
        facts |= _find_cuda(driver_gpus)
    return Machine(
        python=platform.python_version(),
        packages=packages,
        driver=driver_gpus[0].driver if driver_gpus else None,
        driver_gpus=len(driver_gpus),
        environment=find_environment(),
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
