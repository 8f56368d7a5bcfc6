"""PipeFusion in a real ComfyUI: a picture over stages is that of the schedule in one process."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.parallel_runtime.pipefusion_emulator import emulate
from tests.tiny_flux import make_state_dict, tiny_config

from .workflow import SAVE, Prompt, Workflow, link, node

pytestmark = pytest.mark.host

_SCALE, _SHIFT = 0.3611, 0.1159
"""Of FLUX.1's latents."""


def _random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _simple_sigmas(steps: int, count: int = 10000, shift: float = 1.15) -> torch.Tensor:
    """The scheduler "simple" over FLUX.1's sigmas."""
    table = [math.exp(shift) / (math.exp(shift) + count / (index + 1) - 1) for index in range(count)]
    return torch.tensor([*(table[-(1 + int(step * count / steps))] for step in range(steps)), 0.0])


_CASES = {
    "KSampler": Workflow(),
    "BasicGuider": Workflow(sampler_node="SamplerCustomAdvanced"),
    "CFGGuider": Workflow(sampler_node="SamplerCustomAdvanced", cfg=4.0),
}


@pytest.mark.long_but_for("KSampler", "CFGGuider")
@pytest.mark.slow
@pytest.mark.parametrize("case", _CASES)
def test_a_run_over_two_stages_gives_the_emulated_schedules_latent(host, monkeypatch, case):
    if not host.small_flux:
        pytest.skip("this ComfyUI takes no tiny FLUX.1")
    import diffusers

    workflow = replace(_CASES[case].on("cpu:2"), stages=(2, 3, 1))
    graph = workflow.prompt()
    if case == "BasicGuider":
        graph["guider"] = node("BasicGuider", model=link("model"), conditioning=link("positive"))
    found = host.latent(host.run(graph), SAVE)
    assert host.last_run()["loop"] == "pool"
    assert "stages 2" in str(host.last_run())
    config = tiny_config()
    transformer = diffusers.FluxTransformer2DModel(**config).eval()
    transformer.load_state_dict(make_state_dict(config))
    branches = 1 if workflow.cfg == 1 else 2
    expected = emulate(
        monkeypatch, transformer, _random(workflow.seed, 1, 16, 14, 20), _simple_sigmas(workflow.steps),
        [_random(seed, 1, 7, 64) for seed in (11, 22)][:branches],
        [{"y": _random(seed + 1, 1, 32), "guidance": torch.full((1,), 3.0)} for seed in (11, 22)][:branches],
        cfg=workflow.cfg, sampler="euler", patches=3, warmup=1,
    )  # fmt: skip
    expected = expected / _SCALE + _SHIFT
    assert (found - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.long_but_for("stages1")
@pytest.mark.slow
@pytest.mark.parametrize("stages", [None, (2, 3, 1)])
def test_a_guider_of_two_models_goes_step_by_step_and_says_why(host, stages):
    workflow = Workflow(sampler_node="SamplerCustomAdvanced", cfg=4.0)
    over = replace(workflow.on("cpu:2"), stages=stages)
    expected = host.latent(host.run(_with_two_models(workflow)), SAVE)
    one = host.latent(host.run(workflow.prompt()), SAVE)
    assert (one - expected).abs().max() > 0.01  # or else the second model would not be tested
    found = host.latent(host.run(_with_two_models(over)), SAVE)
    assert (found - expected).abs().max() < 1e-4 * max(1.0, float(expected.abs().max()))
    for run in host.get("/parallel_dit/status")["runs"][:2]:  # one of each model
        assert (run["loop"], run["why"]) == ("steps", "a guider of two models, where a loop in the workers has one")


def _with_two_models(workflow: Workflow) -> Prompt:
    """The negative prompt goes through the same file in float8."""
    graph = workflow.prompt()
    second = replace(workflow, weight_dtype="fp8_e4m3fn").prompt()
    graph["second"] = second["model"]
    given = {"model": link("model"), "model_negative": link("second")}
    graph["guider"] = node(
        "DualModelGuider", **given, positive=link("positive"), negative=link("negative"), cfg=workflow.cfg
    )
    return graph
