"""The promise: Parallel Loader gives the latents that Load Diffusion Model gives, whatever samples them.

float32 on both sides, so what remains is the order of additions in two implementations of the same transformer.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from nodes.run_notices import IN_TURN

from .workflow import SAVE, Workflow, sampled_in_pool

pytestmark = pytest.mark.host

TOLERANCE = 1e-4
ODD = (0, 1, 13, 19)
PICTURE = (9, 1, 14, 20)

BY_KSAMPLER = {
    "euler": Workflow(),
    "euler, cfg, unequal prompts": Workflow(cfg=4.0, lengths=(9, 5)),
    "euler, beta, cfg": Workflow(scheduler="beta", cfg=4.0),
    "dpmpp_2m, simple, cfg": Workflow(sampler="dpmpp_2m", cfg=4.0),
    "dpmpp_2m, beta, batch": Workflow(sampler="dpmpp_2m", scheduler="beta", latent=(0, 2, 14, 20)),
    "dpmpp_2m, beta, cfg, batch": Workflow(sampler="dpmpp_2m", scheduler="beta", cfg=4.0, latent=(0, 2, 14, 20)),
    "euler_ancestral": Workflow(sampler="euler_ancestral"),
    "euler_ancestral, beta, cfg": Workflow(sampler="euler_ancestral", scheduler="beta", cfg=4.0),
    "odd sizes": Workflow(latent=ODD, cfg=4.0),
    "odd sizes, batch of three": Workflow(latent=(0, 3, 9, 7), cfg=4.0, lengths=(3, 4)),
    "denoise 0.6 on a picture": Workflow(latent=PICTURE, denoise=0.6),
    "noise mask": Workflow(latent=PICTURE, mask=True, cfg=4.0),
    "ModelSamplingFlux": Workflow(flux_shift=True),
    "SamplerCustomAdvanced": Workflow(sampler_node="SamplerCustomAdvanced", cfg=4.0, lengths=(9, 5)),
    "KSampler Advanced": Workflow(sampler_node="KSamplerAdvanced", latent=PICTURE, cfg=4.0),
    "uni_pc": Workflow(sampler="uni_pc", cfg=4.0),
    "a reference latent": Workflow(reference=True, cfg=4.0),
    "schnell": Workflow(model="schnell.safetensors", cfg=4.0),
    "extra input channels": Workflow(model="canny.safetensors", cfg=4.0),
    "a bf16 file in the type that ComfyUI takes": Workflow(model="bf16.safetensors", cfg=4.0),
}

IN_POOL = {
    **{f"{sampler}, {scheduler}, cfg {cfg:g}": Workflow(sampler=sampler, scheduler=scheduler, cfg=cfg)
       for sampler in ("euler", "euler_ancestral", "dpmpp_2m", "heun", "lcm", "ddim", "ddpm", "uni_pc")
       for scheduler, cfg in (("simple", 1.0), ("beta", 4.0))},
    "uni_pc_bh2, karras": Workflow(sampler="uni_pc_bh2", scheduler="karras", cfg=4.0),
    "unequal prompts": Workflow(cfg=4.0, lengths=(9, 5)),
    "batch": Workflow(latent=(0, 2, 14, 20), cfg=4.0),
    "batch, ancestral": Workflow(latent=(0, 2, 14, 20), sampler="euler_ancestral"),
    "two pictures of a batch of three": Workflow(latent=(9, 3, 14, 20), taken=(1, 2), sampler="euler_ancestral"),
    "odd sizes": Workflow(latent=ODD, cfg=4.0),
    "denoise 0.6 on a picture": Workflow(latent=PICTURE, denoise=0.6, sampler="dpmpp_2m"),
    "noise mask": Workflow(latent=PICTURE, mask=True, cfg=4.0),
    "noise mask, denoise, lcm": Workflow(latent=PICTURE, mask=True, denoise=0.6, sampler="lcm"),
    "noise mask of ddim": Workflow(latent=PICTURE, mask=True, sampler="ddim"),
    "ModelSamplingFlux": Workflow(flux_shift=True, sampler="dpmpp_2m"),
    "a reference latent": Workflow(reference=True, cfg=4.0),
    "schnell": Workflow(model="schnell.safetensors", cfg=4.0, sampler="dpmpp_2m"),
    "extra input channels": Workflow(model="canny.safetensors", cfg=4.0, lengths=(9, 5)),
    "nothing to denoise": Workflow(latent=PICTURE, denoise=0.0),
}  # fmt: skip

STEP_BY_STEP = {
    "a function after CFG": Workflow(patch="cfg", cfg=4.0),
}


def compare(host, workflow: Workflow, parallel: Workflow) -> list[tuple[str, str]]:
    """Assert that both make the same latent; return the texts that the parallel run showed on its nodes."""
    ours = host.run(parallel.prompt())
    theirs = host.run(workflow.prompt())
    latent, wanted = host.latent(ours, SAVE), host.latent(theirs, SAVE)
    assert latent.shape == wanted.shape
    assert wanted.std() > 0.1
    assert (latent - wanted).abs().max() < TOLERANCE
    return ours.texts


@pytest.mark.long_but_for(
    "euler, cfg, unequal prompts",
    "euler_ancestral, beta, cfg",
    "denoise 0.6 on a picture",
    "noise mask",
    "SamplerCustomAdvanced",
    "KSampler Advanced",
    "extra input channels",
)
@pytest.mark.slow_but_for("euler, cfg, unequal prompts")
@pytest.mark.parametrize("name", BY_KSAMPLER)
def test_comfyuis_nodes_give_the_same_latent_over_two_ranks_by_a_loop_in_the_pool(host, name):
    compare(host, BY_KSAMPLER[name], BY_KSAMPLER[name].on("cpu:2"))
    assert host.last_run()["loop"] == "pool", host.last_run()["why"]


@pytest.mark.long_but_for(
    "dpmpp_2m, beta, cfg 4",
    "euler_ancestral, simple, cfg 1",
    "uni_pc, beta, cfg 4",
    "batch, ancestral",
    "two pictures of a batch of three",
    "noise mask of ddim",
    "odd sizes",
    "nothing to denoise",
)
@pytest.mark.slow_but_for("dpmpp_2m, beta, cfg 4")
@pytest.mark.parametrize("name", IN_POOL)
def test_the_loop_in_the_pool_gives_ksamplers_latent(host, name):
    workflow = IN_POOL[name]
    texts = compare(host, workflow, workflow.on("cpu:2", "ParallelSampler"))
    if name == "nothing to denoise":
        assert "sampler" not in dict(texts), "nothing ran, so nothing is said of it"
    else:
        assert sampled_in_pool(texts)


@pytest.mark.slow
@pytest.mark.parametrize("reason", STEP_BY_STEP)
def test_what_the_pool_does_not_know_runs_per_step_and_the_node_names_it(host, reason):
    workflow = STEP_BY_STEP[reason]
    texts = compare(host, workflow, workflow.on("cpu:2", "ParallelSampler"))
    assert any(node == "sampler" and reason in text for node, text in texts), texts


@pytest.mark.long_but_for("ParallelSampler")
@pytest.mark.slow
@pytest.mark.parametrize("sampler_node", ["KSampler", "ParallelSampler"])
def test_one_rank_gives_the_same_latent(host, sampler_node):
    workflow = Workflow(cfg=4.0, lengths=(9, 5))
    compare(host, workflow, workflow.on("cpu:1", sampler_node))


@pytest.mark.long_but_for("KSampler-dpmpp_2m-False", "ParallelSampler-uni_pc-True")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampler_node", "sampler", "in_turn"),
    [("KSampler", "dpmpp_2m", False), ("ParallelSampler", "dpmpp_2m", False), ("ParallelSampler", "uni_pc", True)],
)
def test_stages_that_are_exact_give_the_same_latent_and_say_where_they_run_in_turn(
    host, sampler_node, sampler, in_turn
):
    """Per step the stages run one after the other; in the pool all steps are warm-up here."""
    workflow = Workflow(cfg=4.0, lengths=(9, 5), sampler=sampler)
    texts = compare(host, workflow, replace(workflow.on("cpu:2", sampler_node), stages=(2, 3, workflow.steps)))
    said = [text for node, text in texts if node == "sampler"]
    assert (IN_TURN in said[-1]) is in_turn  # what stays on the node


@pytest.mark.slow
def test_stale_keys_change_the_picture_a_little_and_the_next_picture_comes(host):
    workflow = Workflow(steps=6)
    piped = replace(workflow.on("cpu:2", "ParallelSampler"), stages=(2, 2, 1))
    wanted, latent = (host.latent(host.run(each.prompt()), SAVE) for each in (workflow, piped))
    assert TOLERANCE < (latent - wanted).abs().max() < wanted.std()
    compare(host, workflow, workflow.on("cpu:2", "ParallelSampler"))


@pytest.mark.long_but_for("prefixed.safetensors")
@pytest.mark.slow
@pytest.mark.parametrize("model", ["diffusers.safetensors", "prefixed.safetensors"])
def test_every_layout_of_the_same_weights_gives_the_same_latent(host, model):
    workflow = Workflow(sampler="dpmpp_2m", cfg=4.0)
    other = Workflow(sampler="dpmpp_2m", cfg=4.0, loader="cpu:2", model=model)
    compare(host, workflow, other)
