"""A prompt may hold numbers as numbers, and leave out what has a default."""

from __future__ import annotations

import pytest
import torch

from .comfy_host import PromptRefused
from .workflow import MODEL, SAMPLER, SAVE, Prompt, Workflow, link, node

pytestmark = [pytest.mark.host, pytest.mark.slow]


def prompt_with(**config) -> Prompt:
    graph = Workflow(loader="cpu:2", sampler_node="ParallelSampler", steps=2).prompt()
    graph["config"] = node("ParallelConfig", devices="cpu:2", **config)
    graph["model"] = node("ParallelLoader", model_name=MODEL, parallel_config=link("config"))
    kept = ("model", "positive", "negative", "latent_image", "steps")
    graph[SAMPLER]["inputs"] = {key: value for key, value in graph[SAMPLER]["inputs"].items() if key in kept}
    return graph


def test_numbers_are_taken_and_defaults_may_be_left_out(host):
    run = host.run(prompt_with(ulysses=2, data=1, ring=1))
    assert host.latent(run, SAVE).isfinite().all()
    assert any("ulysses 2" in text for name, text in run.texts if name == "model"), run.texts


def test_a_number_that_is_no_choice_is_refused_with_the_choices(host):
    with pytest.raises(PromptRefused) as refused:
        host.run(prompt_with(ulysses=5))
    told = str(refused.value)
    assert '"received_value": 5' in told
    assert told.count("value_not_in_list") == 1, "the other inputs are right"


def test_a_prompt_from_before_with_an_input_that_the_loader_has_no_more_gives_the_same_picture(host):
    before = prompt_with()
    before["model"]["inputs"]["network"] = "diffusers"
    latents = [host.latent(host.run(prompt), SAVE) for prompt in (before, prompt_with())]
    assert torch.equal(*latents)
