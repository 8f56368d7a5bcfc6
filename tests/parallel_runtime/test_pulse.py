"""Every family's forward shows how far it is, compiled or not, and is the same forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from parallel_runtime.networks.diffusers.flux import FLUX
from parallel_runtime.networks.marked_blocks import MARKS, Pulse, find_modules, mark_blocks
from tests import tiny_sdxl
from tests.families import STAGED, Family, build
from tests.parallel_runtime.flux_forward import build_transformer, run
from tests.tiny_model import find_by_name

CPU = torch.device("cpu")


def count_blocks(transformer: nn.Module, spec: Any) -> int:
    return sum(len(list(blocks.children())) for blocks in find_modules(transformer, spec.block_lists).values())


@pytest.mark.long_but_for("Wan", "SDXL")
@pytest.mark.slow_but_for("PixArt")
@pytest.mark.parametrize("name", [*STAGED, "SDXL"])
@torch.no_grad()
def test_a_forward_is_counted_block_by_block_and_gives_the_same_output(name):
    family = STAGED.get(name) or Family("sdxl", tiny_sdxl.tiny_config(), (tiny_sdxl.make_call(1, (8, 8)),))
    spec, transformer, call = find_by_name(family.spec), build(family), dict(family.call)
    x, context = call.pop("x"), call.pop("context")
    timestep = call.pop("timestep", torch.ones(x.shape[0]))
    arguments = spec.to_transformer(x, timestep, context, family.config, **call)
    expected = transformer(**arguments, return_dict=False)[0]
    pulse, keys = Pulse(CPU), list(transformer.state_dict())
    mark_blocks(transformer, spec.block_lists, pulse)
    for forward in (1, 2):
        assert torch.equal(transformer(**arguments, return_dict=False)[0], expected)
        assert pulse.count == forward * count_blocks(transformer, spec)
    assert list(transformer.state_dict()) == keys


@pytest.mark.long
def test_compiled_blocks_without_graph_breaks_are_counted_as_well():
    transformer, pulse = build_transformer(layers=2), Pulse(CPU)
    expected = run(transformer, (5, 3), 7)
    mark_blocks(transformer, FLUX.block_lists, pulse)
    for blocks in find_modules(transformer, FLUX.block_lists).values():
        for block in blocks.children():
            block.compile(fullgraph=True, backend="eager")
    assert torch.equal(run(transformer, (5, 3), 7), expected)
    assert pulse.count == 4


def test_a_long_list_is_marked_about_as_often_as_a_short_one():
    transformer, pulse = build_transformer(layers=1), Pulse(CPU)
    transformer.transformer_blocks = nn.ModuleList(nn.Identity() for _ in range(5 * MARKS))
    mark_blocks(transformer, FLUX.block_lists, pulse)
    assert len(list(transformer.transformer_blocks)) == 5 * MARKS
    assert pulse.count == MARKS
