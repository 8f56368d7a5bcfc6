"""NVLink is known by the GPUs' names, or by what NVML says of each pair."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from parallel_runtime.gpu_memory.nvlink import joined_by_nvlink


def gpus(*names: str) -> list[Any]:
    return [SimpleNamespace(name=name, uuid=f"{index}a-b") for index, name in enumerate(names)]


@pytest.fixture
def nvml(monkeypatch):
    """A driver whose pairs of UUIDs have NVLink, as (lower, higher); what was called of it."""

    def put(*pairs: tuple[str, str]) -> list[str]:
        called: list[str] = []

        def p2p(first: str, second: str, kind: int) -> int:
            assert kind == pynvml.NVML_P2P_CAPS_INDEX_NVLINK
            there = (min(first, second), max(first, second)) in pairs
            return pynvml.NVML_P2P_STATUS_OK if there else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED

        def handle(uuid: str) -> str:
            if not uuid.startswith("GPU-") or uuid == "GPU-":
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
            return uuid.removeprefix("GPU-")

        monkeypatch.setattr(pynvml, "nvmlInit", lambda: called.append("init"))
        monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: called.append("shut down"))
        monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", handle)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetP2PStatus", p2p)
        return called

    return put


def test_some_gpus_always_have_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert joined_by_nvlink(gpus("NVIDIA H200", "NVIDIA H100 80GB HBM3"))
    for name in (
        "NVIDIA H100 PCIe",
        "NVIDIA A100-PCIE-40GB",
        "NVIDIA H100 NVL",
        "GRID A100-40C",
        "NVIDIA A800 40GB Active",
    ):
        assert not joined_by_nvlink(gpus(name, name))
    assert not joined_by_nvlink(gpus("NVIDIA GeForce RTX 4090"))
    assert not joined_by_nvlink(gpus("NVIDIA H200", "NVIDIA GeForce RTX 3090"))


def test_others_have_it_where_the_driver_says_so_of_every_pair(nvml):
    three = gpus(*["NVIDIA GeForce RTX 3090"] * 3)
    called = nvml(("0a-b", "1a-b"))
    assert joined_by_nvlink(three[:2])
    assert not joined_by_nvlink(three)
    assert called == ["init", "shut down"] * 2
    assert not joined_by_nvlink([SimpleNamespace(name="NVIDIA GeForce RTX 3090")] * 2)  # an older torch


def test_without_a_driver_there_is_none(monkeypatch):
    def no_library() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", no_library)
    assert not joined_by_nvlink(gpus("NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 3090"))
