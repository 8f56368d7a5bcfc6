"""Networks of ComfyUI's that keep something on themselves between calls: whoever has it, ranks do the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallel_runtime.networks.comfyui.comfy_network import OwnCache
from parallel_runtime.networks.tables.blocks import Network
from parallel_runtime.networks.tables.comfyui import NETWORKS
from tests.comfyui_checkout import HOW, find_comfyui
from tests.ranks import run_ranks

COMFYUI = find_comfyui()


@pytest.mark.skipif(COMFYUI is None, reason=HOW)
def test_ranks_of_which_one_alone_has_kept_the_prompt_compute_what_one_process_does():
    found = run_ranks(2, "tests.comfyui_networks.own_cache:apart", {"comfyui": str(COMFYUI)}, timeout=60)
    for each in found:
        assert len(each) == 6
        assert not {before: difference for before, difference in each.items() if not difference < 1e-5}


class Remembers(torch.nn.Module):
    """Keeps what a call's tensor gave by the number of the object, as HiDream O1 does with reference pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, Any] = {}

    def forget(self) -> None:
        self.kept.clear()

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        return self.kept.setdefault(id(picture), picture.sum())


def test_pictures_are_told_apart_by_what_they_are_and_not_by_the_number_of_their_object():
    network = Remembers()
    cache = OwnCache(Network("", clears="forget", by_object=("picture",)))
    pictures = torch.arange(12.0).reshape(6, 2)
    for row in [0, 1, 0, 2, 3, 4, 5, 0, 1, 0]:
        arguments = {"picture": pictures[row : row + 1]}  # a new object, often where the last one was
        cache.same_objects(network, arguments)
        assert network(**arguments) == pictures[row].sum()
    assert len(network.kept) == 4


def test_every_network_that_keeps_something_by_objects_can_let_go_of_it():
    assert all(data.clears for data in NETWORKS.values() if data.by_object)
    cache, told = OwnCache(Network("")), SimpleNamespace()
    cache.clear(told)  # nothing is asked of one that keeps nothing
    assert vars(told) == {}
