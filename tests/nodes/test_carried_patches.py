"""Functions of ComfyUI's nodes as data: the ranks make them again, and what they cannot make is named."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nodes import carried_patches
from nodes.carried_patches import CarriedPatches, NotCarried, act_always
from parallel_runtime.errors import RequestError
from parallel_runtime.networks.comfyui import live_patches
from parallel_runtime.networks.comfyui.live_patches import LivePatches
from parallel_runtime.networks.comfyui.module_tree import build_module
from parallel_runtime.networks.comfyui.node_rules import PATCH_RULES, PatchRule, name_of, rule_of
from parallel_runtime.requests.patches import CARRIED, OBJECTS, PATCHES, Attached, Patch
from tests.comfyui_checkout import HOW, find_comfyui
from tests.host.older_host import skip_as_older
from tests.ranks import run_ranks

COMFYUI = find_comfyui()
X = torch.zeros(1, 4, 6, 8)


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("between", "sigmas", "always"),
    [
        ((1e9, 0.0), [1.0, 0.5, 0.0], True),
        ((0.9, 0.0), [1.0, 0.5, 0.0], False),
        ((1e9, 0.4), [1.0, 0.5, 0.0], False),
        ((1e9, 0.4), [1.0, 0.5], True),
        ((0.9, 0.0), None, False),
    ],
)
def test_a_function_acts_always_where_its_range_has_all_sigmas_of_the_run(between, sigmas, always):
    made = type("AnimaLLLitePatch", (), {"__module__": "comfy.ldm.anima.lllite"})()
    made.sigma_start, made.sigma_end = between
    part = type("AnimaLLLiteMLPPatch", (), {"__module__": "comfy.ldm.anima.lllite"})()
    part.patch = made
    options = {"patches": {"mlp_patch": [part]}, "sample_sigmas": None if sigmas is None else torch.tensor(sigmas)}
    assert act_always(options) is always
    assert act_always({"patches": {"attn1_patch": [print]}})


def test_a_name_is_that_of_the_class_whatever_the_method_is_called():
    name = "comfy_extras.nodes_slg:SkipLayerGuidanceDiT"
    assert name_of(f"{name}.execute.<locals>.skip") == name_of(f"{name}.skip_guidance.<locals>.skip") == f"{name}.skip"
    assert rule_of(f"{name}.execute.<locals>.skip") is PATCH_RULES[f"{name}.skip"]
    assert rule_of("os:system") is None


@pytest.mark.parametrize("code", ["os:system", "comfy.utils:load_torch_file", "comfy_extras.nodes_slg:Other.f"])
def test_a_rank_runs_no_code_that_is_not_in_the_table(code):
    live = LivePatches(torch.device("cpu"))
    with pytest.raises(RequestError, match="no worker may run"):
        live.put_in({CARRIED: {PATCHES: {"attn1_patch": [Patch(code, 0)]}}})


@pytest.mark.parametrize("name", ["subprocess:Popen", "os:environ", "torch.nn.functional:linear"])
def test_a_rank_builds_no_class_that_is_no_network(name):
    form = {"class": name, "fields": {}, "parameters": [], "buffers": [], "children": []}
    with pytest.raises(RequestError, match="know no network"):
        build_module(form, [])


def test_objects_that_remember_have_one_number_for_a_run():
    carried = CarriedPatches()
    value, other = SimpleNamespace(), SimpleNamespace()
    first = carried.kept_number(value)
    assert carried.kept_number(value) == first != carried.kept_number(other)
    carried.begin()
    assert carried.kept_number(value) > first


def test_objects_of_all_models_have_numbers_of_their_own_and_a_run_is_over_when_it_ends(monkeypatch):
    monkeypatch.setattr(carried_patches, "_RUNNING", weakref.WeakKeyDictionary())
    one, other = CarriedPatches(), CarriedPatches()
    one.begin()
    first = one.kept_number(SimpleNamespace())
    other.begin()  # beside it, as in a guider of two MODELs
    second = other.kept_number(SimpleNamespace())
    assert first != second
    assert other.since == one.since < first
    one.end()
    assert first < other.since < second
    other.end()
    one.begin()
    assert one.since > second


def test_a_rank_lets_go_of_what_a_run_remembered_when_the_next_one_remembers(monkeypatch):
    class Remembers:
        freed = 0

        def free(self) -> None:
            Remembers.freed += 1

    monkeypatch.setattr(live_patches, "rule_of", lambda code: PatchRule("Node", remembers=True))
    monkeypatch.setattr(live_patches, "build", lambda *args: Remembers())
    live = LivePatches(torch.device("cpu"))

    def made(kept: int, since: int) -> Any:
        return live.put_in({CARRIED: {OBJECTS: {"it": Patch("a:B", 0, kept, since)}}})["it"]

    first, second = made(kept=3, since=2), made(kept=5, since=2)
    assert made(kept=3, since=2) is first is not second
    assert Remembers.freed == 0
    assert made(kept=8, since=4) is not second
    assert Remembers.freed == 1
    assert made(kept=5, since=4) is second
    live.forget()
    assert Remembers.freed == 3


def test_a_network_keeps_its_number_as_long_as_it_lives():
    carried = CarriedPatches()
    network = torch.nn.Linear(2, 2)
    number = carried.network_number(network)
    assert number == carried.network_number(network) == CarriedPatches().network_number(network)
    assert CarriedPatches().network_number(torch.nn.Linear(2, 2)) != carried.network_number(network)
    assert Attached(3, network) == Attached(3)
