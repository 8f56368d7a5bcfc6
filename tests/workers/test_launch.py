"""From the artist's devices to ranks."""

from __future__ import annotations

import os

import pytest

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import ConfigurationError
from workers.launch import PoolSpec, rank_environment, resolve_devices


def gpus(count: int):
    return lambda: count


@pytest.mark.parametrize(
    ("devices", "present", "expected"),
    [
        ("auto", 0, PoolSpec("cpu", (0,))),
        ("auto", 2, PoolSpec("cuda", (0, 1))),
        ("1", 2, PoolSpec("cuda", (1,))),
        ("1,0", 2, PoolSpec("cuda", (1, 0))),
        ("cpu", 4, PoolSpec("cpu", (0,))),
        ("cpu:3", 0, PoolSpec("cpu", (0, 1, 2))),
    ],
)
def test_devices_become_ranks(devices, present, expected):
    spec = resolve_devices(ParallelConfig(devices=devices), gpus(present))
    assert spec == expected
    assert PoolSpec.parse(str(spec)) == spec


def test_a_gpu_that_does_not_exist_is_named_with_those_that_do():
    with pytest.raises(ConfigurationError, match=r"asks for GPU 3, but ComfyUI sees 2 GPUs, 0 to 1\. Set devices"):
        resolve_devices(ParallelConfig(devices="0,3"), gpus(2))
    with pytest.raises(ConfigurationError, match="sees no GPU"):
        resolve_devices(ParallelConfig(devices="0"), gpus(0))


def test_degrees_that_need_more_ranks_than_devices_are_refused_with_both_numbers():
    with pytest.raises(ConfigurationError, match=r"needs 8 devices \(cfg 2 × ulysses 4\), and has 2 GPUs"):
        resolve_devices(ParallelConfig(cfg=2, ulysses=4), gpus(2))


def test_ranks_keep_to_the_loopback_interface_and_offline_whatever_the_host_set(tmp_path):
    host = {"NCCL_SOCKET_IFNAME": "eth0", "HF_HUB_OFFLINE": "0", "RANK": "7", "PYTORCH_CUDA_ALLOC_CONF": "backend:x"}
    environment = rank_environment(PoolSpec("cuda", (0, 1)), tmp_path, host)
    assert environment["NCCL_SOCKET_IFNAME"] == environment["GLOO_SOCKET_IFNAME"] == "lo"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert "RANK" not in environment
    assert "backend" not in environment["PYTORCH_CUDA_ALLOC_CONF"]


def test_nccl_does_not_register_memory_that_lies_in_expandable_segments(tmp_path):
    environment = rank_environment(PoolSpec("cuda", (0, 1)), tmp_path, {"NCCL_GRAPH_REGISTER": "1"})
    assert "expandable_segments:True" in environment["PYTORCH_CUDA_ALLOC_CONF"]
    assert environment["NCCL_GRAPH_REGISTER"] == "0"


@pytest.mark.parametrize("host", [{}, {"TORCHINDUCTOR_CACHE_DIR": "/elsewhere"}])
def test_kernels_lie_with_the_graphs_from_the_start_so_that_a_compiler_process_and_its_rank_share_them(tmp_path, host):
    environment = rank_environment(PoolSpec("cuda", (0, 1)), tmp_path, host)
    graphs = environment["TORCHINDUCTOR_CACHE_DIR"]
    assert environment["TRITON_CACHE_DIR"] == f"{graphs}/triton"
    assert graphs == host.get("TORCHINDUCTOR_CACHE_DIR", graphs)
    chosen = rank_environment(PoolSpec("cuda", (0, 1)), tmp_path, {**host, "TRITON_CACHE_DIR": "/kernels"})
    assert chosen["TRITON_CACHE_DIR"] == "/kernels"


@pytest.mark.parametrize(("given", "threads"), [("1", 1), ("", 4), ("100", 4), ("0", 1), ("many", 4)])
def test_a_rank_on_the_cpu_takes_its_share_of_the_cores_or_fewer(tmp_path, monkeypatch, given, threads):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    environment = rank_environment(PoolSpec("cpu", (0, 1)), tmp_path, {"OMP_NUM_THREADS": given})
    assert environment["OMP_NUM_THREADS"] == str(threads)
