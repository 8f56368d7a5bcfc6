"""Which way heads go: the environment and the GPUs' reach decide, on all ranks alike."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallel_runtime.exchange import head_routes
from parallel_runtime.exchange.grown_memory import ExchangedHeads, PeerMemory
from parallel_runtime.exchange.head_routes import HeadRoutes

GPU = torch.device("cuda", 0)


@pytest.fixture
def two_gpus(monkeypatch):
    """A host with two of them, neither variable set."""
    for name in ("NCCL_P2P_DISABLE", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "PARALLEL_DIT_OFF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(head_routes, "_reach_one_another", lambda group, device: True)
    monkeypatch.setattr(head_routes, "_joined", lambda group, device: True)


def way(device: torch.device = GPU) -> str | None:
    routes: Any = HeadRoutes(SimpleNamespace(size=lambda: 2))  # type: ignore[arg-type]
    routes._peers = SimpleNamespace(buffers=lambda heads: "peers")
    routes._host = SimpleNamespace(buffers=lambda heads: "host")
    return routes.buffers(ExchangedHeads((4, 4), 1, 8, 16, torch.bfloat16, device))


def test_gpus_that_reach_each_other_go_to_their_memory_and_others_through_the_hosts(two_gpus, monkeypatch):
    assert way() == "peers"
    monkeypatch.setattr(head_routes, "_reach_one_another", lambda group, device: False)
    assert way() == "host"


@pytest.mark.parametrize("joined", [True, False])
def test_kernels_write_to_peers_where_nvlink_joins_them(two_gpus, monkeypatch, joined):
    monkeypatch.setattr(head_routes, "_joined", lambda group, device: joined)
    routes: Any = HeadRoutes(SimpleNamespace(size=lambda: 2))  # type: ignore[arg-type]
    routes._peers = SimpleNamespace(buffers=lambda heads: routes._peers.by_stores)
    for _ in range(2):
        assert routes.buffers(ExchangedHeads((4, 4), 1, 8, 16, torch.bfloat16, GPU)) is joined


def test_the_environment_says_who_takes_neither(two_gpus, monkeypatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert way() == "host"
    assert way(torch.device("cpu")) is None
    monkeypatch.setenv("PARALLEL_DIT_OFF", "host")
    assert way() is None
    monkeypatch.delenv("PARALLEL_DIT_OFF")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert way() is None  # another host has no memory of this one


def test_two_ranks_of_one_gpu_go_through_the_host(two_gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert way() == "host"


@pytest.mark.parametrize(
    ("others", "reached", "agreed"), [([1], True, True), ([1], False, False), ([], True, False), ([1, 2], True, False)]
)
def test_reach_is_asked_of_the_groups_gpus_alone(monkeypatch, others, reached, agreed):
    asked = []

    def reduce(unused: torch.Tensor, op: object, group: object) -> None:
        unused[others] = 0

    def reach(own: int, other: int) -> bool:
        asked.append((own, other))
        return reached

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", reach)
    monkeypatch.setattr(head_routes.dist, "all_reduce", reduce)
    monkeypatch.setattr(head_routes, "all_agree", lambda own, group, device: own)
    group: Any = SimpleNamespace(size=lambda: 2)
    assert head_routes._reach_one_another(group, torch.device("cpu")) == agreed
    assert asked == [(0, other) for other in others]


@pytest.mark.parametrize("own", [True, False])
def test_whether_nvlink_joins_them_is_asked_of_the_groups_gpus_and_agreed(monkeypatch, own):
    def reduce(unused: torch.Tensor, op: object, group: object) -> None:
        unused[2] = 0

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: index)
    monkeypatch.setattr(head_routes.dist, "all_reduce", reduce)
    monkeypatch.setattr(head_routes, "joined_by_nvlink", lambda gpus: own and gpus == [0, 2])
    votes: list[bool] = []
    monkeypatch.setattr(head_routes, "all_agree", lambda own, group, device: votes.append(own))
    head_routes._joined(SimpleNamespace(size=lambda: 2), torch.device("cpu"))  # type: ignore[arg-type]
    assert votes == [own]


@pytest.mark.parametrize("by_stores", [True, False])
def test_buffers_tell_whether_kernels_write_to_peers(by_stores):
    memory = PeerMemory(SimpleNamespace(group_name="g"))  # type: ignore[arg-type]
    memory.by_stores = by_stores
    heads = ExchangedHeads((4, 4), 1, 8, 16, torch.bfloat16, torch.device("cpu"))
    laid_out = memory._lay_out(heads, (torch.zeros(1 << 16, dtype=torch.uint8), [0, 1]))
    assert laid_out.by_stores is by_stores
