"""Functions of ComfyUI's nodes as data: the ranks make them again, and what they cannot make is named."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from nodes.carried_patches import CarriedPatches, NotCarried
from parallel_runtime.errors import RequestError
from parallel_runtime.networks.comfyui.live_patches import LivePatches
from parallel_runtime.networks.comfyui.module_tree import build_module
from parallel_runtime.networks.comfyui.patch_rules import PATCH_RULES, name_of, rule_of
from parallel_runtime.requests.patches import CARRIED, PATCHES, Attached, Patch
from tests.comfyui_checkout import HOW, find_comfyui
from tests.host.older_host import skip_as_older
from tests.ranks import run_ranks

COMFYUI = find_comfyui()
X = torch.zeros(1, 4, 6, 8)


@pytest.mark.skipif(COMFYUI is None, reason=HOW)
def test_patches_with_networks_of_their_own_compute_in_a_rank_what_they_compute_in_comfyui():
    (found,) = run_ranks(1, "tests.comfyui_networks.patches:agree", {"comfyui": str(COMFYUI)})
    assert found == dict.fromkeys(found, 0.0)
    wanted = {
        "Qwen-Image DiffSynth",
        "USO",
        "Z-Image Fun",
        "LLLite",
        "FreeU",
        "FreeU_V2",
        "downscale",
        "Wan Animate 2",
    }
    if missing := wanted - set(found):
        skip_as_older(COMFYUI, f"has no {', '.join(sorted(missing))}; the others agree")


def test_a_function_of_another_node_is_named_with_the_pack_that_it_is_of():
    def skip(args, extra):
        return args

    with pytest.raises(NotCarried, match="test_a_function"):
        CarriedPatches().carry({"patches": {"attn1_patch": [skip]}}, X)
    skip.__module__ = "/home/me/ComfyUI/custom_nodes/other_pack/nodes"
    skip.__qualname__ = "TheirNode.apply.<locals>.skip"
    with pytest.raises(NotCarried, match="^TheirNode of other_pack$"):
        CarriedPatches().carry({"patches_replace": {"dit": {("double_block", 1): skip}}}, X)


def test_options_without_functions_carry_nothing():
    assert CarriedPatches().carry({"patches": {}, "patches_replace": {"dit": {}}, "rope_options": {"a": 1}}, X) == {}


def test_a_name_is_that_of_the_class_whatever_the_method_is_called():
    name = "comfy_extras.nodes_slg:SkipLayerGuidanceDiT"
    assert name_of(f"{name}.execute.<locals>.skip") == name_of(f"{name}.skip_guidance.<locals>.skip") == f"{name}.skip"
    assert rule_of(f"{name}.execute.<locals>.skip") is PATCH_RULES[f"{name}.skip"]
    assert rule_of("os:system") is None


@pytest.mark.parametrize("code", ["os:system", "comfy.utils:load_torch_file", "comfy_extras.nodes_slg:Other.f"])
def test_a_rank_runs_no_code_that_is_not_in_the_table(code):
    live = LivePatches(torch.device("cpu"))
    with pytest.raises(RequestError, match="no rank may run"):
        live.put_in({CARRIED: {PATCHES: {"attn1_patch": [Patch(code, 0)]}}})


@pytest.mark.parametrize("name", ["subprocess:Popen", "os:environ", "torch.nn.functional:linear"])
def test_a_rank_builds_no_class_that_is_no_network(name):
    form = {"class": name, "fields": {}, "parameters": [], "buffers": [], "children": []}
    with pytest.raises(RequestError, match="knows no network"):
        build_module(form, [])


def test_objects_that_remember_have_one_number_for_a_run():
    carried = CarriedPatches()
    value, other = SimpleNamespace(), SimpleNamespace()
    first = carried.kept_number(value)
    assert carried.kept_number(value) == first != carried.kept_number(other)
    carried.begin()
    assert carried.kept_number(value) > first


def test_a_network_keeps_its_number_as_long_as_it_lives():
    carried = CarriedPatches()
    network = torch.nn.Linear(2, 2)
    assert carried.network_number(network) == carried.network_number(network)
    assert Attached(3, network) == Attached(3)
