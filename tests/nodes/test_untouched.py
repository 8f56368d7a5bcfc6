"""Changes inside of a transformer object whose forward runs elsewhere are found, and named."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import nn

from nodes.untouched import Untouched
from parallel_runtime.errors import RequestError


class Transformer(nn.Module):
    """Blocks on the meta device, as ComfyUI's class is built for a model in the pool."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4, device="meta") for _ in range(5))
        self.register_buffer("table", torch.ones(3, device="meta"))
        self.scale = 1.0

    def forward_orig(self, x):
        return x


def set_weight(transformer):
    transformer.blocks[1].weight = nn.Parameter(torch.ones(4, 4))


def write_weight(transformer):
    with torch.no_grad():
        transformer.blocks[1].bias.mul_(2)


CHANGES = {
    "a replaced diffusion_model.forward_orig": lambda t: setattr(t, "forward_orig", lambda x: 2 * x),
    "a replaced diffusion_model.blocks.3.forward": lambda t: setattr(t.blocks[3], "forward", lambda x: 2 * x),
    "a replaced diffusion_model.blocks.2": lambda t: t.blocks.__setitem__(2, nn.Identity()),
    "a replaced diffusion_model.adapter": lambda t: t.add_module("adapter", nn.Identity()),
    "a hook on diffusion_model.blocks.0": lambda t: t.blocks[0].register_forward_hook(lambda *_: None),
    "a hook on diffusion_model.blocks.4": lambda t: t.blocks[4].register_forward_pre_hook(lambda *_: None),
    "other numbers in diffusion_model.blocks.1.weight": set_weight,
    "other numbers in diffusion_model.blocks.1.bias": write_weight,
    "other numbers in diffusion_model.table": lambda t: setattr(t, "table", torch.zeros(3)),
}


@pytest.mark.parametrize("named", CHANGES)
def test_a_change_is_named_before_a_run(named):
    transformer = Transformer()
    untouched = Untouched(transformer)
    untouched.check()
    CHANGES[named](transformer)
    with pytest.raises(RequestError) as refused:
        untouched.check()
    assert f"changes inside of the transformer: {named}." in str(refused.value)


@pytest.mark.parametrize("named", [name for name in CHANGES if "forward" in name or "hook" in name])
def test_a_method_or_a_hook_that_comes_during_a_run_is_named_at_the_next_call(named):
    transformer = Transformer()
    untouched = Untouched(transformer)
    untouched.check_quickly()
    CHANGES[named](transformer)
    for _ in range(2):  # it is not taken for granted from then on
        with pytest.raises(RequestError, match=named):
            untouched.check_quickly()


def test_what_a_wrapper_undoes_and_plain_values_are_no_changes():
    transformer = Transformer()
    untouched = Untouched(transformer)
    with patch.multiple(transformer, forward_orig=lambda x: x), pytest.raises(RequestError, match="forward_orig"):
        untouched.check_quickly()
    transformer.scale, transformer.steps_seen = 2.0, 7
    untouched.check_quickly()
    untouched.check()


def test_of_many_changes_the_first_are_named_and_the_others_counted():
    transformer = Transformer()
    untouched = Untouched(transformer)
    for block in transformer.blocks:
        block.register_forward_hook(lambda *_: None)
    with pytest.raises(RequestError, match=r"blocks\.0, .*blocks\.2 and 2 more\."):
        untouched.check()


def test_a_method_of_the_class_that_was_replaced_is_named():
    untouched = Untouched(Transformer())
    with patch.object(Transformer, "forward_orig", lambda self, x: x), pytest.raises(RequestError, match="Transformer"):
        untouched.check()
    untouched.check()
