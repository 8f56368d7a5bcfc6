"""Prompts of other seeds, queued together: ranks begin with the next one while a picture is saved, and it is the same
as alone; a prompt that asks for something else gets that."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from .test_same_picture import PICTURE
from .workflow import SAMPLER, SAVE, Prompt, Workflow

pytestmark = pytest.mark.host

BEGUN = "The devices began with it while"
SEEDS = (101, 102, 103, 104)
ONE = Workflow(loader="cpu:2", cfg=4.0)
WORKFLOWS = {
    "KSampler": ONE,
    "ComfyUI's sampler": replace(ONE, sampler="dpmpp_2m_sde"),
    "a mask": replace(ONE, latent=PICTURE, mask=True, denoise=0.6),
    "SamplerCustomAdvanced, two loops": replace(ONE, sampler_node="SamplerCustomAdvanced", steps=6, split=3),
}


def saved(workflow: Workflow, seed: int, name: str) -> Prompt:
    graph = replace(workflow, seed=seed).prompt()
    graph[SAVE]["inputs"]["filename_prefix"] = f"latents/{name}"
    return graph


def slow(workflow: Workflow) -> Prompt:
    """One that lasts until the others are in the queue."""
    return saved(replace(workflow, steps=60), 100, "next")


def queue(host, prompts: list[Prompt]) -> tuple[list[torch.Tensor], list[str]]:
    """The latents of prompts that are queued together, and what their nodes showed."""
    ids = [host.post("/prompt", {"prompt": each, "client_id": host.client_id})["prompt_id"] for each in prompts[:-1]]
    last = host.run(prompts[-1])
    latents = [_latent(host, host.get(f"/history/{each}")[each]["outputs"]) for each in ids]
    return [*latents, _latent(host, last.outputs)], [text for _, text in last.texts]


def _latent(host, outputs) -> torch.Tensor:
    from safetensors.torch import load_file

    (at,) = outputs[SAVE]["latents"]
    return load_file(host.base / "output" / at["subfolder"] / at["filename"])["latent_tensor"]


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each == "KSampler" else pytest.mark.slow) for each in WORKFLOWS]
)
def test_queued_prompts_are_as_each_alone(host, name):
    workflow = WORKFLOWS[name]
    alone = [host.latent(host.run(saved(workflow, seed, "next")), SAVE) for seed in SEEDS]
    together, texts = queue(host, [slow(workflow), *(saved(workflow, seed, "next") for seed in SEEDS)])
    assert all(map(torch.equal, together[1:], alone))
    # The prompts before have told how much there is to do, so all but the first of these.
    assert sum(BEGUN in text for text in texts) == len(SEEDS) - 1
    assert host.last_run()["step_seconds"] > 0


def test_other_prompts_get_what_they_ask_for(host):
    seeds = [saved(ONE, seed, "next") for seed in SEEDS]
    other = saved(replace(ONE, cfg=2.0), 103, "next")
    wanted = [host.latent(host.run(each), SAVE) for each in (seeds[0], other, seeds[3])]
    host.run(seeds[1])
    ours, texts = queue(host, [seeds[0], other, seeds[3]])
    assert all(map(torch.equal, ours, wanted))
    assert not any(BEGUN in text for text in texts)


@pytest.mark.slow
def test_it_can_be_cancelled_as_any_other(host):
    long = replace(ONE, steps=100)
    wanted = host.latent(host.run(saved(ONE, 104, "next")), SAVE)
    host.post("/prompt", {"prompt": saved(long, SEEDS[2], "next"), "client_id": host.client_id})

    def during(run) -> None:
        if SAMPLER in run.executed and not stopped:
            stopped.append(True)
            host.interrupt()

    stopped: list[bool] = []
    last = host.run(saved(long, SEEDS[3], "next"), during)
    assert last.interrupted
    assert torch.equal(host.latent(host.run(saved(ONE, 104, "again")), SAVE), wanted)
