"""What NVIDIA's driver says about GPUs and their links, through NVML (nvidia-ml-py), without a CUDA context.

The package or the driver may be missing; then there is just less to say.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
    """A GPU by its number in nvidia-smi's tables, which is not CUDA's where CUDA_VISIBLE_DEVICES is set.

    Args:
        uuid: without the prefix "GPU-".
        memory_total, memory_used: bytes, when asked; 0 where the driver does not tell.
        capability: such as "9.0"; "" where the driver does not tell.
    """

    index: int
    uuid: str
    name: str
    memory_total: int
    memory_used: int
    driver: str
    capability: str


def list_gpus() -> tuple[DriverGpu, ...]:
    """The driver's GPUs; none where it cannot be asked."""
    with contextlib.suppress(_Silent), _open_driver() as nvml, _nothing_said(nvml):
        driver = nvml.nvmlSystemGetDriverVersion()
        return tuple(
            DriverGpu(index, _uuid(nvml, gpu), nvml.nvmlDeviceGetName(gpu), *_memory(nvml, gpu), driver, _cc(nvml, gpu))
            for index, gpu in enumerate(_gpus(nvml))
        )
    return ()


def find_links() -> dict[tuple[int, int], str]:
    """The way between every two GPUs, in words; pairs that the driver does not know it of are left out."""
    links = {}
    with contextlib.suppress(_Silent), _open_driver() as nvml, _nothing_said(nvml):
        gpus = _gpus(nvml)
        for first, second in itertools.permutations(range(len(gpus)), 2):
            with _nothing_said(nvml):
                links[first, second] = _link(nvml, gpus[first], gpus[second])
    return links


def processes_by_gpu() -> dict[str, dict[int, int]]:
    """GPU's UUID (as in `DriverGpu`) -> process -> bytes, of processes that compute."""
    held: dict[str, dict[int, int]] = {}
    with contextlib.suppress(_Silent), _open_driver() as nvml, _nothing_said(nvml):
        for gpu in _gpus(nvml):
            running = nvml.nvmlDeviceGetComputeRunningProcesses(gpu)
            held[_uuid(nvml, gpu)] = {process.pid: process.usedGpuMemory or 0 for process in running}
    return held


class _Silent(Exception):
    """The driver cannot be asked: there is none, it cannot do its work, or there is nothing to ask with."""


@contextlib.contextmanager
def _open_driver() -> Iterator[Any]:
    """NVML's functions, while they may be called."""
    try:
        import pynvml as nvml
    except ImportError:  # which the doctor's list of packages says
        raise _Silent from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise _Silent from error
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _nothing_said(nvml: Any) -> contextlib.suppress:
    """Leave out what the driver does not tell: virtual GPUs and small ones lack many answers."""
    return contextlib.suppress(nvml.NVMLError)


def _gpus(nvml: Any) -> list[Any]:
    return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]


def _memory(nvml: Any, gpu: Any) -> tuple[int, int]:
    with _nothing_said(nvml):  # the second version leaves out what the driver keeps for itself, as nvidia-smi does
        memory = nvml.nvmlDeviceGetMemoryInfo(gpu, version=nvml.nvmlMemory_v2)
        return memory.total, memory.used
    with _nothing_said(nvml):
        memory = nvml.nvmlDeviceGetMemoryInfo(gpu)
        return memory.total, memory.used
    return 0, 0


def _uuid(nvml: Any, gpu: Any) -> str:
    return str(nvml.nvmlDeviceGetUUID(gpu).removeprefix("GPU-"))


def _cc(nvml: Any, gpu: Any) -> str:
    with _nothing_said(nvml):
        return ".".join(map(str, nvml.nvmlDeviceGetCudaComputeCapability(gpu)))
    return ""


def _link(nvml: Any, first: Any, second: Any) -> str:
    with _nothing_said(nvml):
        if nvml.nvmlDeviceGetP2PStatus(first, second, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK:
            return "NVLink"
    ancestor = nvml.nvmlDeviceGetTopologyCommonAncestor(first, second)
    return next(words for level, words in _PCIE.items() if getattr(nvml, level) == ancestor)
