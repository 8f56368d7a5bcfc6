"""What NVIDIA's driver says about GPUs and their links, through NVML (nvidia-ml-py), without a CUDA context. Package
or driver may be missing; then there is just less to say."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from parallel_runtime.gpu_memory.nvlink import ask_driver, has_nvlink

_PCIE = {
    "NVML_TOPOLOGY_INTERNAL": "PCIe, one switch between",
    "NVML_TOPOLOGY_SINGLE": "PCIe, one switch between",
    "NVML_TOPOLOGY_MULTIPLE": "PCIe, several switches between",
    "NVML_TOPOLOGY_HOSTBRIDGE": "PCIe, through the CPU",
    "NVML_TOPOLOGY_NODE": "PCIe, through the CPU and its host bridges",
    "NVML_TOPOLOGY_SYSTEM": "PCIe, from one CPU socket to another",
}
"""NVML's nearest common ancestor of two GPUs, in words."""


@dataclass(frozen=True)
class DriverGpu:
    """A GPU by its number in nvidia-smi's tables, which is not CUDA's where CUDA_VISIBLE_DEVICES is set; `uuid` without
    the prefix "GPU-", memory in bytes, when asked, `capability` such as "9.0". The driver may not tell: 0, ""."""

    index: int
    uuid: str
    name: str
    memory_total: int
    memory_used: int
    driver: str
    capability: str


def list_gpus() -> tuple[DriverGpu, ...]:
    """The driver's GPUs; none where it cannot be asked."""
    found: list[DriverGpu] = []

    def ask(nvml: Any, gpus: list[Any]) -> None:
        driver, name = nvml.nvmlSystemGetDriverVersion(), nvml.nvmlDeviceGetName
        found[:] = [
            DriverGpu(index, _uuid(nvml, gpu), name(gpu), *_memory(nvml, gpu), driver, _capability(nvml, gpu))
            for index, gpu in enumerate(gpus)
        ]

    _with_driver(ask)
    return tuple(found)


def count_visible() -> int:
    """GPUs that torch will find: the driver's, or those that are left of them. CUDA reads numbers up to the first that
    no GPU has: ComfyUI's --default-device names 32."""
    present = len(list_gpus())
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return present
    names = (name.strip() for name in chosen.split(","))
    exists = {str(number) for number in range(present)}
    return sum(1 for _ in itertools.takewhile(lambda name: name in exists or name.startswith(("GPU-", "MIG-")), names))


def find_links() -> dict[tuple[int, int], str]:
    """The way between every two GPUs, in words; pairs that the driver does not know it of are left out."""
    links = {}

    def ask(nvml: Any, gpus: list[Any]) -> None:
        for first, second in itertools.permutations(range(len(gpus)), 2):
            with contextlib.suppress(nvml.NVMLError):
                links[first, second] = _link(nvml, gpus[first], gpus[second])

    _with_driver(ask)
    return links


def processes_by_gpu() -> dict[str, dict[int, int]]:
    """GPU's UUID (as in `DriverGpu`) -> process -> bytes, of processes that compute."""
    held: dict[str, dict[int, int]] = {}

    def ask(nvml: Any, gpus: list[Any]) -> None:
        for gpu in gpus:
            running = nvml.nvmlDeviceGetComputeRunningProcesses(gpu)
            held[_uuid(nvml, gpu)] = {process.pid: process.usedGpuMemory or 0 for process in running}

    _with_driver(ask)
    return held


def _with_driver(ask: Callable[[Any, list[Any]], None]) -> None:
    """As `ask_driver`, with the GPUs, too."""
    ask_driver(lambda nvml: ask(nvml, [nvml.nvmlDeviceGetHandleByIndex(n) for n in range(nvml.nvmlDeviceGetCount())]))


def _memory(nvml: Any, gpu: Any) -> tuple[int, int]:
    # The second version leaves out what the driver keeps for itself, as nvidia-smi does.
    for version in ({"version": nvml.nvmlMemory_v2}, {}):
        with contextlib.suppress(nvml.NVMLError):
            memory = nvml.nvmlDeviceGetMemoryInfo(gpu, **version)
            return memory.total, memory.used
    return 0, 0


def _uuid(nvml: Any, gpu: Any) -> str:
    return str(nvml.nvmlDeviceGetUUID(gpu).removeprefix("GPU-"))


def _capability(nvml: Any, gpu: Any) -> str:
    with contextlib.suppress(nvml.NVMLError):
        return ".".join(map(str, nvml.nvmlDeviceGetCudaComputeCapability(gpu)))
    return ""


def _link(nvml: Any, first: Any, second: Any) -> str:
    with contextlib.suppress(nvml.NVMLError):
        if has_nvlink(nvml, first, second):
            return "NVLink"
    ancestor = nvml.nvmlDeviceGetTopologyCommonAncestor(first, second)
    return next(words for level, words in _PCIE.items() if getattr(nvml, level) == ancestor)
