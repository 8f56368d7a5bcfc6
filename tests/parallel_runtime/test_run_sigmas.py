"""The sigma of a call, found again by its timestep in a table of the run's."""

from __future__ import annotations

import torch

from parallel_runtime.networks.comfyui.seam import look_up, tabulate


def test_a_calls_sigma_is_that_of_the_run_to_the_bit_and_none_between_them():
    sigmas = torch.linspace(1, 0, 30)
    table = tabulate({"sample_sigmas": sigmas}, lambda sigma: 1000 / (1 / sigma))
    timesteps = 1000 / (1 / sigmas[:-1])
    for index, timestep in enumerate(timesteps):
        options = look_up(table, timestep.expand(2))
        # As HunyuanVideo asks: which step of the run it is.
        assert torch.where(options["sigmas"][0] == options["sample_sigmas"])[0].tolist() == [index]
    between = look_up(table, timesteps[3:5].mean(0, keepdim=True))
    assert not (between["sigmas"] == between["sample_sigmas"]).any()


def test_without_the_runs_sigmas_nothing_is_said():
    assert tabulate({}, lambda sigma: sigma) is None
