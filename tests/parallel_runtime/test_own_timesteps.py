"""Timesteps that a model makes of a loop's are found as shares of it, and made again of any other."""

from __future__ import annotations

import pytest
import torch

from nodes.transformer_call import TransformerCall, split_timesteps
from parallel_runtime.sampling.own_timesteps import FIRST, are_plain, find_own_timesteps

SIGMAS = (0.87, 0.435, 0.123)


def evaluated(timestep: torch.Tensor, branches=(1, 0), **conditioning: torch.Tensor):
    """What a call with these branches, in one batch, shows."""
    rows = torch.zeros(timestep.shape[0], 1)
    return split_timesteps([TransformerCall(rows, timestep, conditioning, None, {"cond_or_uncond": list(branches)})])


def test_the_samplers_own_timestep_is_plain():
    assert are_plain(evaluated(torch.tensor([431.0, 431.0])), torch.tensor([431.0]))
    assert not are_plain(evaluated(torch.tensor([0.5, 0.5])), torch.tensor([0.25]))
    # Of another type, the later ones are rounded though this one is not (Mage-Flow).
    assert not are_plain(evaluated(torch.tensor([0.5, 0.5], dtype=torch.bfloat16)), torch.tensor([0.5]))


MASKS = torch.rand(2, 9, 1).bfloat16().float()
MADE = {
    "a mask of a short type": lambda t: evaluated(MASKS * t.repeat(2).view(2, 1, 1), a_timestep=t.repeat(2)),
    "counted from one": lambda t: evaluated(1.0 - t.repeat(2)),
    "of a short type": lambda t: evaluated(t.repeat(2).bfloat16()),
}


@pytest.mark.parametrize("model", MADE)
def test_they_are_found_and_made_again_to_the_last_bit(model):
    first, second, third = (torch.tensor([sigma]) for sigma in SIGMAS)
    own = find_own_timesteps(*((at, MADE[model](at)) for at in (first, second)))
    assert own is not None
    wanted = MADE[model](third)
    assert {index: named.keys() for index, named in own.items()} == {
        index: named.keys() for index, named in wanted.items()
    }
    for index, named in wanted.items():
        for name, timestep in named.items():
            made = own[index][name].at(third)
            assert made.dtype == timestep.dtype
            assert torch.equal(made, timestep)


def test_what_is_no_share_is_not_found():
    first, second = torch.tensor([0.8]), torch.tensor([0.4])
    assert find_own_timesteps((first, evaluated(first**2, (0,))), (second, evaluated(second**2, (0,)))) is None
    assert find_own_timesteps((first, {0: {FIRST: first}}), (second, {})) is None
