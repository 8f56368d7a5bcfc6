"""Parallel Config speaks of the model that it is connected to."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.flux_facts import FLUX_DEV
from nodes.config_meaning import explain_limits
from nodes.prompt_graph import find_config
from parallel_runtime.config import ParallelConfig
from parallel_runtime.planning.explanation import details_of
from parallel_runtime.planning.wish import TYPICAL, Wish
from parallel_runtime.requests.facts import CPU

UNET = replace(FLUX_DEV, title="SDXL", splits_sequence=False, has_stages=False, heads=1)


def test_limits_are_those_of_the_model():
    flux = explain_limits(details_of(Wish(ParallelConfig(), 4, FLUX_DEV, TYPICAL, CPU)))
    assert "With FLUX.1, ulysses can be up to 24" in flux
    assert "Stages can be up to 57" in flux
    assert flux.endswith("without CFG: ulysses 4.")
    staged = details_of(Wish(ParallelConfig(pipe=2, ulysses=2), 4, FLUX_DEV, TYPICAL, CPU))
    assert explain_limits(staged).endswith("without CFG: stages 2 × ulysses 2.")
    unet = explain_limits(details_of(Wish(ParallelConfig(), 2, UNET, TYPICAL, CPU)))
    assert "With SDXL, only cfg and data can be above 1" in unet
    assert "can only be whole" in unet
    assert "can only be whole" not in flux
    assert "tages" not in unet
    assert unet.endswith("one device.")


def test_the_node_is_found_also_inside_of_a_subgraph():
    prompt = {"5:3": {"inputs": {"parallel_config": ["5:2", 0]}}, "4": {"inputs": {}}}
    assert find_config(prompt, "5:3") == "5:2"
    assert find_config(prompt, "4") is None
    assert find_config(None, None) is None
