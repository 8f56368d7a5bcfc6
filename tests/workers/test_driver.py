"""What the driver says, through NVML: with GPUs of every kind of link, with answers missing, and without a driver."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from workers.driver import find_links, list_gpus, processes_by_gpu

SWITCH = "switch"


@dataclass(frozen=True)
class Driver:
    """GPUs by number, in NVML's words. `nvlinks`: GPU -> where each of its links goes; `ancestors`: pair -> level."""

    gpus: int
    nvlinks: dict[int, list[Any]]
    ancestors: dict[tuple[int, int], int]
    p2p_told: bool = True
    memory_v2: bool = True


def not_supported(*_: Any, **__: Any) -> None:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


@pytest.fixture
def nvml(monkeypatch):
    """Puts a driver under pynvml's own functions; returns the list of opened and shut."""

    def put(driver: Driver) -> list[str]:
        def p2p(first: int, second: int, capability: int) -> int:
            assert capability == pynvml.NVML_P2P_CAPS_INDEX_NVLINK
            if not driver.p2p_told:
                not_supported()
            reached = set(driver.nvlinks.get(first, ())) & {second, SWITCH}
            return pynvml.NVML_P2P_STATUS_OK if reached else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED

        def memory(gpu: int, version: int | None = None) -> SimpleNamespace:
            if version is not None and not driver.memory_v2:
                not_supported()
            return SimpleNamespace(total=100, used=10 * gpu + (version is None))

        opened: list[str] = []
        answers = {
            "nvmlInit": lambda: opened.append("init"),
            "nvmlShutdown": lambda: opened.append("shut down"),
            "nvmlSystemGetDriverVersion": lambda: "570.86.15",
            "nvmlDeviceGetCount": lambda: driver.gpus,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetUUID": lambda gpu: f"GPU-{gpu}a-b",
            "nvmlDeviceGetName": lambda gpu: "NVIDIA X",
            "nvmlDeviceGetMemoryInfo": memory,
            "nvmlDeviceGetCudaComputeCapability": lambda gpu: (9, gpu),
            "nvmlDeviceGetP2PStatus": p2p,
            "nvmlDeviceGetTopologyCommonAncestor": lambda a, b: driver.ancestors[min(a, b), max(a, b)],
            "nvmlDeviceGetComputeRunningProcesses": lambda gpu: [
                SimpleNamespace(pid=7, usedGpuMemory=5),
                SimpleNamespace(pid=8 + gpu, usedGpuMemory=None),
            ],
        }
        for name, answer in answers.items():
            monkeypatch.setattr(pynvml, name, answer)
        return opened

    return put


PCIE = {(0, 1): pynvml.NVML_TOPOLOGY_SINGLE, (0, 2): pynvml.NVML_TOPOLOGY_SYSTEM, (1, 2): pynvml.NVML_TOPOLOGY_NODE}


def test_gpus_come_with_uuid_and_memory_and_the_driver_is_shut_again(nvml):
    opened = nvml(Driver(2, {}, {}))
    gpus = list_gpus()
    assert [(gpu.index, gpu.uuid, gpu.memory_used, gpu.driver, gpu.capability) for gpu in gpus] == [
        (0, "0a-b", 0, "570.86.15", "9.0"),
        (1, "1a-b", 10, "570.86.15", "9.1"),
    ]
    assert opened == ["init", "shut down"]
    assert processes_by_gpu() == {"0a-b": {7: 5, 8: 0}, "1a-b": {7: 5, 9: 0}}


def test_an_older_driver_tells_the_memory_its_own_way(nvml):
    nvml(Driver(2, {}, {}, memory_v2=False))
    assert [gpu.memory_used for gpu in list_gpus()] == [1, 11]


def test_gpus_on_pcie_have_their_way_in_words(nvml):
    nvml(Driver(3, {}, PCIE))
    links = find_links()
    assert {pair: kind for pair, kind in links.items() if pair[0] < pair[1]} == {
        (0, 1): "PCIe, one switch between",
        (0, 2): "PCIe, from one CPU socket to another",
        (1, 2): "PCIe, through the CPU and its host bridges",
    }
    assert all(links[b, a] == kind for (a, b), kind in links.items())


@pytest.mark.parametrize("told", [True, False])
def test_nvlinks_are_told_of_straight_or_through_switches(nvml, told):
    nvml(Driver(3, {0: [1, SWITCH], 1: [0], 2: [SWITCH]}, PCIE, p2p_told=told))
    links = find_links()
    if told:
        assert (links[0, 1], links[1, 0], links[0, 2], links[2, 0]) == ("NVLink",) * 4
    assert links[1, 2] == ("PCIe, through the CPU and its host bridges")


def test_a_pair_that_the_driver_knows_no_way_between_is_left_out(nvml, monkeypatch):
    nvml(Driver(2, {}, PCIE))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTopologyCommonAncestor", not_supported)
    assert find_links() == {}


def test_without_a_driver_or_without_the_package_there_is_nothing_and_no_trouble(monkeypatch):
    def no_library() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", no_library)
    assert (list_gpus(), find_links(), processes_by_gpu()) == ((), {}, {})
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert (list_gpus(), find_links(), processes_by_gpu()) == ((), {}, {})


def test_a_driver_that_cannot_do_its_work_lists_nothing(monkeypatch):
    def mismatch() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    monkeypatch.setattr(pynvml, "nvmlInit", mismatch)
    assert list_gpus() == ()
