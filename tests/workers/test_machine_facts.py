"""What a machine was measured to do is kept, survives damage, and depends on the devices."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest

from parallel_runtime import measured
from parallel_runtime.requests.facts import CPU, GIB, HOST_MEMORY, NVLINK, PCIE
from parallel_runtime.requests.requests import Load
from workers import machine_facts
from workers.launch import PoolSpec
from workers.machine_facts import find_machine, guess_link, recall, remember
from workers.state_folder import state_directory

TWO = PoolSpec("cuda", (0, 1))


def gpus(*uuids: str, memory: int = 100 * GIB) -> tuple[SimpleNamespace, ...]:
    return tuple(SimpleNamespace(name="NVIDIA H200", uuid=uuid, total_memory=memory) for uuid in uuids)


GPUS = gpus("aaaa", "bbbb")


@pytest.fixture(autouse=True)
def empty_state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    monkeypatch.setattr(machine_facts, "_properties", lambda spec: GPUS)


def test_measured_facts_come_back_for_the_same_devices_only_and_with_todays_memory():
    assumed = recall(TWO, GPUS, NVLINK)
    assert not assumed.measured
    link = replace(NVLINK, all_to_all=123.0, measured=True)
    remember(TWO, replace(assumed, matmul=321.0, measured=True, link=link))
    known = recall(TWO, gpus("aaaa", "bbbb", memory=50 * GIB), NVLINK)
    assert (known.matmul, known.link) == (321.0, link)
    assert known.memory_bytes == pytest.approx(assumed.memory_bytes / 2, rel=1e-6)
    assert not recall(PoolSpec("cuda", (0,)), GPUS[:1], NVLINK).measured
    assert not recall(TWO, GPUS, HOST_MEMORY).measured


def test_facts_are_of_gpus_by_uuid_whatever_their_numbers_and_of_one_driver_and_torch(monkeypatch, tmp_path):
    remember(TWO, replace(recall(TWO, GPUS, NVLINK), measured=True))
    assert recall(TWO, GPUS[::-1], NVLINK).measured
    assert recall(PoolSpec("cuda", (2, 3)), GPUS, NVLINK).measured  # CUDA_VISIBLE_DEVICES is another
    others = gpus("aaaa", "cccc")
    assert not recall(TWO, others, NVLINK).measured  # the same numbers, another GPU behind one of them
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15\nGCC version: ...\n")
    monkeypatch.setattr(measured, "_DRIVER", driver)
    assert "570.86.15" in measured.software()
    assert not recall(TWO, GPUS, NVLINK).measured
    monkeypatch.undo()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(measured, "version", lambda name: "2.99")
    assert not recall(TWO, GPUS, NVLINK).measured


@pytest.mark.parametrize("text", ["", "[]", "{", '{"x": 1}', "null"])
def test_a_damaged_file_is_as_good_as_none(text):
    assumed = recall(TWO, GPUS, NVLINK)
    remember(TWO, replace(assumed, measured=True))
    (path,) = (state_directory() / "measured").iterdir()
    assert recall(TWO, GPUS, NVLINK).measured
    path.write_text(text)
    assert recall(TWO, GPUS, NVLINK) == assumed


def test_facts_of_another_version_are_measured_anew():
    remember(TWO, recall(TWO, GPUS, NVLINK))
    (path,) = (state_directory() / "measured").iterdir()
    now = path.read_text()
    path.write_text(now.replace('"matmul"', '"products"'))
    assert not recall(TWO, GPUS, NVLINK).measured
    remember(TWO, replace(recall(TWO, GPUS, NVLINK), measured=True, host_rate=54.0))
    assert recall(TWO, GPUS, NVLINK).host_rate == 54.0
    path.write_text(path.read_text().replace('"host_rate"', '"other"'))
    assert not recall(TWO, GPUS, NVLINK).measured


def test_hosts_are_joined_by_a_network_until_it_is_measured():
    machine = recall(PoolSpec("cuda", (0, 1), hosts=2), GPUS, NVLINK)
    assert machine.ranks_per_host == 2
    assert machine.link_over(1, 2) == NVLINK
    assert machine.link_over(1, 4).all_to_all < machine.link_over(2, 2).all_to_all * 1.01 < NVLINK.all_to_all


def test_the_kind_of_a_link_is_guessed_by_the_gpus(monkeypatch):
    h200s = [SimpleNamespace(name="NVIDIA H200")] * 2
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert guess_link(h200s, True) == NVLINK
    assert guess_link([SimpleNamespace(name="NVIDIA H100 PCIe")], True) == PCIE
    assert guess_link(h200s, False) == HOST_MEMORY
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert guess_link(h200s, True) == HOST_MEMORY


def test_cpu_ranks_are_never_kept():
    spec = PoolSpec("cpu", (0, 1))
    assert find_machine(spec) is CPU
    remember(spec, replace(CPU, measured=True))
    assert not (state_directory() / "measured").exists()


def test_facts_travel_with_a_load_request_unchanged():
    machine = recall(PoolSpec("cuda", (0, 1), hosts=2), GPUS, NVLINK)
    load = Load("m", "p", "bfloat16", {}, 2, machine)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(load), type=Load).machine == machine
