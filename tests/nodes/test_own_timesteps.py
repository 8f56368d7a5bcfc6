"""Timesteps that a model makes of a sampler's are found as shares of it, and made again of any other."""

from __future__ import annotations

import torch

from nodes.own_timesteps import are_plain, find_shares, read_timesteps
from nodes.transformer_call import TransformerCall
from parallel_runtime.denoising.own_timesteps import call_of
from parallel_runtime.requests.conditioning import Conditioning


def evaluated(timestep: torch.Tensor, branches=(1, 0), **conditioning: torch.Tensor):
    """What a call with these branches, in one batch, shows."""
    rows = torch.zeros(timestep.shape[0], 1)
    return read_timesteps([TransformerCall(rows, timestep, conditioning, None, {"cond_or_uncond": list(branches)})])


def test_the_samplers_own_timestep_is_plain():
    assert are_plain(evaluated(torch.tensor([431.0, 431.0])), torch.tensor([431.0]))
    assert not are_plain(evaluated(torch.tensor([0.5, 0.5])), torch.tensor([0.25]))
    # Of another type, the later ones are rounded though this one is not (Mage-Flow).
    assert not are_plain(evaluated(torch.tensor([0.5, 0.5], dtype=torch.bfloat16)), torch.tensor([0.5]))


def test_masks_of_a_short_type_are_found_and_give_the_same_timesteps():
    masks = torch.rand(2, 9, 1).bfloat16().float()
    at = {sigma: torch.tensor([sigma]) for sigma in (0.87, 0.435, 0.123)}
    made = {
        sigma: evaluated(masks * timestep.expand(2).view(2, 1, 1), a_timestep=timestep.repeat(2))
        for sigma, timestep in at.items()
    }
    shares = find_shares((at[0.87], made[0.87]), (at[0.435], made[0.435]))
    assert shares is not None
    for index, named in made[0.123].items():
        call = call_of(torch.zeros(1, 1), at[0.123], Conditioning({"context": 1}), shares[index])
        assert torch.equal(call.timestep, named[""])
        assert torch.equal(call.conditioning.arguments["a_timestep"], named["a_timestep"])


def test_what_is_no_share_is_not_found():
    first, second = torch.tensor([0.8]), torch.tensor([0.4])
    assert find_shares((first, evaluated(1 - first, (0,))), (second, evaluated(1 - second, (0,)))) is None
