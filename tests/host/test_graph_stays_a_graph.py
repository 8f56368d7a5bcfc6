"""Progress, preview, cancel, caching, unloading and errors behave as with a native MODEL."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import replace

import pytest

from .comfy_host import PromptRefused, Run
from .host_models import write_model
from .workflow import LOADER, SAMPLER, SAVE, Workflow

pytestmark = pytest.mark.host

SAMPLERS = ["KSampler", "ParallelSampler"]
LONG = Workflow(loader="cpu:2", steps=400, cfg=4.0, latent=(0, 1, 64, 64))


def pool_pids(host) -> set[int]:
    """Process ids of this ComfyUI's ranks."""
    found = set()
    for process in os.listdir("/proc"):
        if process.isdigit():
            try:
                command = open(f"/proc/{process}/cmdline").read().split("\0")  # noqa: SIM115
                environment = open(f"/proc/{process}/environ").read()  # noqa: SIM115
            except OSError:
                continue
            parents = {"torch.distributed.run", "workers.supervisor"} & set(command)
            if "workers.rank" in command and not parents and str(host.base) in environment:
                found.add(int(process))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sampler_node", SAMPLERS)
def test_progress_counts_every_step_and_shows_previews(host, sampler_node):
    run = host.run(Workflow(loader="cpu:2", sampler_node=sampler_node, steps=5, seed=77).prompt())
    assert run.error is None
    steps = [(value, maximum) for node, value, maximum in run.progress if node == SAMPLER]
    assert sorted(set(steps)) == [(step, 5) for step in range(1, 6)]
    assert run.previews
    assert run.previews[0][:2] == b"\xff\xd8"  # JPEG


@pytest.mark.slow
def test_the_loader_shows_the_plan(host):
    run = host.run(Workflow(loader="cpu:2", model="plan.safetensors").prompt())
    assert run.error is None, run.error
    assert any(node in (LOADER, "model") and "ulysses" in text.lower() for node, text in run.texts), run.texts


@pytest.mark.slow
@pytest.mark.parametrize("sampler_node", SAMPLERS)
def test_after_a_run_the_plan_that_ran_stands_on_the_sampler_alone(host, sampler_node):
    workflow = Workflow(loader="cpu:2", sampler_node=sampler_node, cfg=4.0, steps=5, latent=(0, 1, 10, 12))
    run = host.run(replace(workflow, model="plan.safetensors").prompt())
    assert run.error is None, run.error
    ran = r".* per step\. Latent 10 × 12\. cfg 2: the batch of 2 is split 2 ways, 1 each, "
    assert re.match(ran, [text for node, text in run.texts if node == SAMPLER][-1]), run.texts
    assert not any(re.search(ran, text) for node, text in run.texts if node != SAMPLER), run.texts


@pytest.mark.slow
def test_a_model_of_another_loader_samples_as_with_ksampler(host):
    latents = [host.latent(host.run(Workflow(sampler_node=name, seed=91).prompt()), SAVE) for name in SAMPLERS]
    assert latents[0].equal(latents[1])


@pytest.mark.slow_but_for("ParallelSampler")
@pytest.mark.parametrize("sampler_node", SAMPLERS)
def test_cancel_stops_soon_and_the_next_prompt_finds_the_pool_warm(host, sampler_node):
    workflow = Workflow(loader="cpu:2", sampler_node=sampler_node, seed=101)
    assert host.run(workflow.prompt()).error is None
    before = pool_pids(host)
    assert len(before) >= 2  # a test before this one may have had more
    pressed: list[int] = []

    def press(run: Run) -> None:
        if run.progress and not pressed:
            pressed.append(len(run.progress))
            host.interrupt()

    run = host.run(replace(LONG, sampler_node=sampler_node).prompt(), during=press)
    assert run.interrupted
    assert run.error is None
    assert len({value for _, value, _ in run.progress}) < 350
    after = host.run(replace(workflow, seed=102).prompt())
    assert after.error is None
    assert host.latent(after, SAVE).isfinite().all()
    assert pool_pids(host) == before


@pytest.mark.slow
def test_a_second_prompt_reuses_loader_and_processes(host):
    workflow = Workflow(loader="cpu:2", seed=31)
    host.run(workflow.prompt())
    before = pool_pids(host)
    again = host.run(replace(workflow, seed=32).prompt())
    assert again.error is None
    assert "model" not in again.executed
    assert pool_pids(host) == before


@pytest.mark.slow
def test_a_file_replaced_on_disk_is_loaded_again(host):
    workflow = Workflow(loader="cpu:2", model="replaced.safetensors")
    write_model(host, workflow.model, seed=1)
    first = host.latent(host.run(workflow.prompt()), SAVE)
    write_model(host, workflow.model, seed=2)
    run = host.run(workflow.prompt())
    second = host.latent(run, SAVE)
    assert "model" in run.executed
    assert (first - second).abs().max() > 0.1
    wanted = host.latent(host.run(workflow.on("native").prompt()), SAVE)
    assert (second - wanted).abs().max() < 1e-4


@pytest.mark.slow
def test_unload_frees_the_weights_and_the_cached_model_loads_them_again(host):
    workflow = Workflow(loader="cpu:2", seed=41)
    first = host.latent(host.run(workflow.prompt()), SAVE)
    processes = pool_pids(host)
    host.post("/free", {"unload_models": True})
    run = host.run(replace(workflow, denoise=0.99999).prompt())  # a changed input, so that the sampler runs again
    assert run.error is None
    assert "model" not in run.executed
    assert (host.latent(run, SAVE) - first).abs().max() < 1e-4
    assert pool_pids(host) == processes


_REPLACED = r"a replaced diffusion_model\.(forward_orig|forward_core_with_concat)"
BAD = {
    "too many ranks": (
        Workflow(loader="0,1,2"),
        r"GPU",
    ),
    "NaN latent": (Workflow(loader="cpu:2", latent=(9, 1, 14, 20), broken=True), r"NaN.*[Ii]nput latent"),
    "NaN latent in the pool": (
        Workflow(loader="cpu:2", sampler_node="ParallelSampler", latent=(9, 1, 14, 20), broken=True),
        r"NaN.*[Ii]nput latent",
    ),
    "attention patch": (
        Workflow(loader="cpu:2", patch="attention"),
        r"functions that ModelPatch of tensor.pack sets inside of the model.*Remove the node",
    ),
    "attention patch in the pool": (
        Workflow(loader="cpu:2", sampler_node="ParallelSampler", patch="attention"),
        r"functions that ModelPatch of tensor.pack sets inside of the model.*Remove the node",
    ),
    "changes inside": (
        Workflow(loader="cpu:2", model="prefixed.safetensors", patch="inside"),
        rf"{_REPLACED}, a hook on .*(img_in|x_embedder), other numbers in .*(txt_in|context_embedder)\.weight\..*Free",
    ),
    "changes inside, in the pool": (
        Workflow(loader="cpu:2", model="prefixed.safetensors", patch="inside", sampler_node="ParallelSampler"),
        _REPLACED,
    ),
    "changes inside during a run": (
        Workflow(loader="cpu:2", patch="inside during a run"),
        _REPLACED,
    ),
    "changes inside during a run, in the pool": (
        Workflow(loader="cpu:2", patch="inside during a run", sampler_node="ParallelSampler"),
        _REPLACED,
    ),
    "a VAE": (
        Workflow(loader="cpu:2", model="vae.safetensors"),
        r"a VAE.*supported by this ComfyUI",
    ),
    "truncated file": (Workflow(loader="cpu:2", model="truncated.safetensors"), r"truncated.*again"),
    "devices that mean nothing": (Workflow(loader="gpu one"), r"not understood.*Write auto"),
}


@pytest.mark.slow_but_for("attention patch in the pool")
@pytest.mark.parametrize("name", BAD)
def test_bad_input_names_cause_and_fix_and_the_next_prompt_works(host, name):
    workflow, expected = BAD[name]
    run = host.run(workflow.prompt())
    assert run.error is not None
    message = run.error["exception_message"]
    assert re.search(expected, message, re.DOTALL), message
    if run.error["node_type"] in (
        "ParallelLoader",
        "ParallelSampler",
    ):  # not of its last run
        assert [text for node, text in run.texts if node == run.error["node_id"]][-1] == "Stopped before the end."
    good = host.run(Workflow(loader="cpu:2", seed=1000 + list(BAD).index(name)).prompt())
    assert good.error is None


@pytest.mark.slow
@pytest.mark.parametrize("sampler_node", SAMPLERS)
def test_scaled_positions_are_those_of_load_diffusion_model(host, sampler_node):
    workflow = Workflow(loader="cpu:2", sampler_node=sampler_node, patch="rope", seed=61, model="plan.safetensors")
    ours = host.run(workflow.prompt())
    assert ours.error is None, ours.error["exception_message"]
    wanted = host.latent(host.run(workflow.on("native", "KSampler").prompt()), SAVE)
    assert (host.latent(ours, SAVE) - wanted).abs().max() < 1e-4 * wanted.abs().max()


@pytest.mark.parametrize("name", ["gone.safetensors", "flux/"])  # of before: a folder of diffusers'
def test_a_missing_file_is_refused_by_name(host, name):
    with pytest.raises(PromptRefused, match=re.escape(name)):
        host.run(Workflow(loader="cpu:2", model=name).prompt())


def test_the_pack_imports_quickly(host):
    times = re.findall(r"([\d.]+) seconds.*?: .*parallel-dit", host.log.read_text())
    assert times
    assert float(times[0]) < 5.0  # 0.1 s where nothing else runs; what it must not import: test_pack_import.py


@pytest.mark.slow
def test_a_pool_that_was_killed_is_replaced_at_the_next_prompt(host):
    workflow = Workflow(loader="cpu:2", seed=51)
    first = host.latent(host.run(workflow.prompt()), SAVE)
    before = pool_pids(host)
    for process in before:
        os.kill(process, signal.SIGKILL)
    run = host.run(replace(workflow, denoise=0.99999).prompt())  # a changed input, so that the sampler runs again
    if run.error is not None:  # the death was noticed by this prompt: it says so, and the next one has a fresh pool
        assert "fresh workers" in run.error["exception_message"]
        run = host.run(replace(workflow, denoise=0.99999).prompt())
    assert run.error is None
    assert (host.latent(run, SAVE) - first).abs().max() < 1e-4
    assert len(pool_pids(host)) == len(before)
    assert not pool_pids(host) & before


@pytest.mark.slow
@pytest.mark.parametrize("sampler_node", SAMPLERS)
def test_the_largest_seed_works(host, sampler_node):
    run = host.run(Workflow(loader="cpu:2", sampler_node=sampler_node, seed=2**64 - 1).prompt())
    assert run.error is None, run.error["exception_message"]
