"""One run for each part of a latent, driven in turns, against one run over the whole."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_runtime.sampling.denoiser import FLOW, PREDICTIONS, Denoiser, Inpaint
from parallel_runtime.sampling.samplers import SAMPLERS, SUPPORTED, run_steps, take_steps

SEED = 11
SIGMAS = {"flow": (1.0, 0.9, 0.7, 0.45, 0.2, 0.05, 0.0), "eps": (14.6, 7.0, 3.0, 1.2, 0.5, 0.1, 0.0)}


def pointwise(x: torch.Tensor, timestep: torch.Tensor) -> list[torch.Tensor]:
    """An output that looks at one position at a time, so that only the sampler could mix patches."""
    return [torch.tanh(x + torch.sin(timestep).view(-1, 1, 1, 1)), torch.sin(x)]


def run_in_patches(sampler, denoiser, x, sigmas, rows):
    """As a pipeline does: one generator per patch of rows, each step taken patch by patch."""
    edges = torch.tensor([0, *rows]).cumsum(0).tolist()
    parts = [(..., slice(low, high), slice(None)) for low, high in pairwise(edges)]
    runs = [take_steps(sampler, x[part], sigmas) for part in parts]
    denoisers = [denoiser.part(part) for part in parts]
    evaluations, finished = [next(run) for run in runs], []
    while not finished:
        assert len({one.index for one in evaluations}) == 1
        for position, run in enumerate(runs):
            try:
                evaluations[position] = run.send(denoisers[position](evaluations[position]))
            except StopIteration as stopped:
                finished.append(stopped.value)
    assert len(finished) == len(runs)
    return torch.cat(finished, dim=2)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(SUPPORTED),
    kind=st.sampled_from(sorted(PREDICTIONS)),
    rows=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    steps=st.integers(1, 6),
    ends_clean=st.booleans(),
    masked=st.booleans(),
)
def test_a_run_in_patches_is_the_run_over_the_whole(name, kind, rows, steps, ends_clean, masked):
    sampler, prediction = SAMPLERS[name], PREDICTIONS[kind]
    levels = SIGMAS["flow" if prediction is FLOW else "eps"]
    sigmas = torch.tensor(levels[-steps - 1 :] if ends_clean else levels[: steps + 1][:6])
    shape = (2, 3, sum(rows), 5)
    stream = torch.Generator().manual_seed(SEED)
    x, latent, noise = (torch.randn(shape, generator=stream) for _ in range(3))
    inpaint = Inpaint(torch.rand(shape, generator=stream), latent, noise) if masked else None
    denoiser = Denoiser(pointwise, prediction, sigmas, 2.5, inpaint)
    whole = run_steps(sampler, denoiser, x, sigmas, lambda *step: None)
    parts = run_in_patches(sampler, denoiser, x, sigmas, rows)
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=1e-5)
