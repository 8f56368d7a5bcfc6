"""What NVIDIA's driver says about GPUs and their links, through NVML (nvidia-ml-py), without a CUDA context.

The package or the driver may be missing; then there is just less to say.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

_PCIE: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "NVML_TOPOLOGY_INTERNAL": ("PIX", "PCIe, one switch between"),
        "NVML_TOPOLOGY_SINGLE": ("PIX", "PCIe, one switch between"),
        "NVML_TOPOLOGY_MULTIPLE": ("PXB", "PCIe, several switches between"),
        "NVML_TOPOLOGY_HOSTBRIDGE": ("PHB", "PCIe, through the CPU"),
        "NVML_TOPOLOGY_NODE": ("NODE", "PCIe, through the CPU and its host bridges"),
        "NVML_TOPOLOGY_SYSTEM": ("SYS", "PCIe, from one CPU socket to another"),
    }
)
"""NVML's nearest common ancestor of two GPUs -> what `nvidia-smi topo -m` calls it, and in words."""


@dataclass(frozen=True)
class DriverGpu:
    """A GPU as the driver counts it, which is not how CUDA counts where CUDA_VISIBLE_DEVICES is set.

    Args:
        index: number in nvidia-smi's tables.
        uuid: without the prefix "GPU-".
        name: such as "NVIDIA H200".
        memory_total, memory_used: bytes, when asked; 0 where the driver does not tell.
        driver: version of the driver.
        capability: compute capability, such as "9.0"; "" where the driver does not tell.
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
            DriverGpu(
                index,
                nvml.nvmlDeviceGetUUID(gpu).removeprefix("GPU-"),
                nvml.nvmlDeviceGetName(gpu),
                *_memory(nvml, gpu),
                driver,
                _capability(nvml, gpu),
            )
            for index, gpu in enumerate(_gpus(nvml))
        )
    return ()


def find_links() -> dict[tuple[int, int], str]:
    """The way between every two GPUs as `nvidia-smi topo -m` has it: "NV18", "PIX", "PXB", "PHB", "NODE" or "SYS".

    Pairs that the driver does not know the way between are left out.
    """
    links = {}
    with contextlib.suppress(_Silent), _open_driver() as nvml, _nothing_said(nvml):
        gpus = _gpus(nvml)
        buses = [nvml.nvmlDeviceGetPciInfo(gpu).busId for gpu in gpus]
        for first in range(len(gpus)):
            for second in range(len(gpus)):
                with _nothing_said(nvml):
                    if first != second:
                        links[first, second] = _link(nvml, gpus[first], gpus[second], buses[second], buses)
    return links


def processes_by_gpu() -> dict[str, dict[int, int]]:
    """GPU's UUID (as in `DriverGpu`) -> process -> bytes, of processes that compute."""
    held: dict[str, dict[int, int]] = {}
    with contextlib.suppress(_Silent), _open_driver() as nvml, _nothing_said(nvml):
        for gpu in _gpus(nvml):
            running = nvml.nvmlDeviceGetComputeRunningProcesses(gpu)
            uuid = nvml.nvmlDeviceGetUUID(gpu).removeprefix("GPU-")
            held[uuid] = {process.pid: process.usedGpuMemory or 0 for process in running}
    return held


def describe_link(kind: str) -> str:
    """A link's kind in words."""
    if kind.startswith("NV"):
        return f"NVLink ({kind[2:]} {'link' if kind == 'NV1' else 'links'})"
    return dict(_PCIE.values())[kind]


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


def _capability(nvml: Any, gpu: Any) -> str:
    with _nothing_said(nvml):
        return ".".join(map(str, nvml.nvmlDeviceGetCudaComputeCapability(gpu)))
    return ""


def _link(nvml: Any, first: Any, second: Any, bus: Any, buses: list[Any]) -> str:
    if count := _count_nvlinks(nvml, first, second, bus, buses):
        return f"NV{count}"
    ancestor = nvml.nvmlDeviceGetTopologyCommonAncestor(first, second)
    return next(kind for level, (kind, _) in _PCIE.items() if getattr(nvml, level) == ancestor)


def _count_nvlinks(nvml: Any, first: Any, second: Any, bus: Any, buses: list[Any]) -> int:
    """NVLinks of the first GPU by which it reaches the second: straight ones, else those that go to switches."""
    with _nothing_said(nvml):
        if nvml.nvmlDeviceGetP2PStatus(first, second, nvml.NVML_P2P_CAPS_INDEX_NVLINK) != nvml.NVML_P2P_STATUS_OK:
            return 0
    straight = switched = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        with _nothing_said(nvml):
            if nvml.nvmlDeviceGetNvLinkState(first, link) != nvml.NVML_FEATURE_ENABLED:
                continue
            other = None
            with _nothing_said(nvml):  # virtual machines hide the switches
                other = nvml.nvmlDeviceGetNvLinkRemotePciInfo(first, link).busId
            straight += other == bus
            switched += other not in buses
    return straight or switched
