"""Every sampler of this ComfyUI, under every node that samples: its loop runs in the pool, with the same latent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .test_same_picture import PICTURE
from .workflow import SAMPLER, SAVE, Prompt, Workflow, link, node

pytestmark = pytest.mark.host

SAMPLERS = [
    "euler", "euler_cfg_pp", "euler_ancestral", "euler_ancestral_cfg_pp", "heun", "heunpp2", "exp_heun_2_x0",
    "exp_heun_2_x0_sde", "dpm_2", "dpm_2_ancestral", "lms", "dpm_fast", "dpm_adaptive", "dpmpp_2s_ancestral",
    "dpmpp_2s_ancestral_cfg_pp", "dpmpp_sde", "dpmpp_sde_gpu", "dpmpp_2m", "dpmpp_2m_cfg_pp", "dpmpp_2m_sde",
    "dpmpp_2m_sde_gpu", "dpmpp_2m_sde_heun", "dpmpp_2m_sde_heun_gpu", "dpmpp_3m_sde", "dpmpp_3m_sde_gpu", "ddpm", "lcm",
    "ipndm", "ipndm_v", "deis", "res_multistep", "res_multistep_cfg_pp", "res_multistep_ancestral",
    "res_multistep_ancestral_cfg_pp", "gradient_estimation", "gradient_estimation_cfg_pp", "er_sde", "seeds_2",
    "seeds_3", "sa_solver", "sa_solver_pece", "ddim", "uni_pc", "uni_pc_bh2",
]  # fmt: skip
NODES = {
    "KSampler": Workflow(),
    "KSampler, cfg, a batch": Workflow(cfg=4.0, lengths=(9, 5), latent=(0, 2, 14, 20)),
    "KSampler, a mask, denoise 0.6": Workflow(cfg=4.0, latent=PICTURE, mask=True, denoise=0.6),
    "KSampler Advanced": Workflow(sampler_node="KSamplerAdvanced", cfg=4.0, latent=PICTURE, steps=6),
    "SamplerCustomAdvanced": Workflow(sampler_node="SamplerCustomAdvanced", cfg=4.0),
}


GUIDANCE = {
    "CFGNorm": {"strength": 0.8, "pre_cfg": False},
    "CFGNorm before": {"strength": 0.7, "pre_cfg": True},
    "CFGZeroStar": {},
    "TCFG": {},
    "Mahiro": {},
    "RescaleCFG": {"multiplier": 0.7},
    "VideoLinearCFGGuidance": {"min_cfg": 1.5},
    "VideoTriangleCFGGuidance": {"min_cfg": 1.5},
    "DifferentialDiffusion": {"strength": 0.8},
    "SkipLayerGuidanceSD3": {"layers": "1", "scale": 2.0, "start_percent": 0.3, "end_percent": 0.8},
    "SkipLayerGuidanceDiT": {
        "double_layers": "0", "single_layers": "0, 1", "scale": 3.0, "start_percent": 0.0, "end_percent": 0.7,
        "rescaling_scale": 0.4,
    },
    "SkipLayerGuidanceDiTSimple": {
        "double_layers": "", "single_layers": "1", "start_percent": 0.2, "end_percent": 1.0,
    },
}  # fmt: skip
"""Nodes that set a function around guidance, and their inputs."""


def in_the_pool(host, workflow: Prompt, parallel: Prompt) -> None:
    """Assert that a loop in the pool gives Load Diffusion Model's latent, to 1e-4 of its scale."""
    ours, theirs = (host.latent(host.run(each), SAVE) for each in (parallel, workflow))
    assert theirs.std() > 0.1
    assert (ours - theirs).abs().max() < 1e-4 * max(1.0, float(theirs.abs().max()))
    assert host.last_run()["loop"] == "pool", host.last_run()["why"]


@pytest.mark.slow_but_for("KSampler, cfg, a batch-er_sde")
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("by", NODES)
def test_every_sampler_runs_in_the_pool_under_every_node(host, by, sampler):
    workflow = replace(NODES[by], sampler=sampler)
    in_the_pool(host, workflow.prompt(), workflow.on("cpu:2").prompt())


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["cpu:1", "cpu:2"])
@pytest.mark.parametrize("sampler", ["dpmpp_2m", "er_sde"])
def test_timesteps_that_count_up_run_in_the_ranks(host, sampler, devices):
    workflow = Workflow(cfg=4.0, sampler=sampler, patch="times that count up")
    plain, changed = (host.latent(host.run(each.prompt()), SAVE) for each in (replace(workflow, patch=""), workflow))
    assert (changed - plain).abs().max() > 0.01  # or else nothing would be tested
    in_the_pool(host, workflow.prompt(), workflow.on(devices).prompt())


def guided(workflow: Workflow, *names: str) -> Prompt:
    """With these nodes on the MODEL, in this order."""
    graph, model = workflow.prompt(), "model"
    for name in names:
        graph[name] = node(name.partition(" ")[0], model=link(model), **GUIDANCE[name])
        model = name
    graph["guider" if "guider" in graph else SAMPLER]["inputs"]["model"] = link(model)
    return graph


@pytest.mark.slow_but_for("CFGNorm-cpu:2")
@pytest.mark.parametrize("devices", ["cpu:1", "cpu:2"])
@pytest.mark.parametrize("name", GUIDANCE)
def test_functions_around_guidance_run_in_the_ranks(host, name, devices):
    workflow = Workflow(cfg=4.0, latent=PICTURE, sampler="res_multistep", mask=name == "DifferentialDiffusion")
    plain = host.latent(host.run(workflow.prompt()), SAVE)
    changed = host.latent(host.run(guided(workflow, name)), SAVE)
    assert (changed - plain).abs().max() > 0.01  # or else nothing would be tested
    in_the_pool(host, guided(workflow, name), guided(workflow.on(devices), name))


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["euler", "euler_ancestral", "euler_cfg_pp"])
def test_several_functions_around_guidance_run_in_their_order(host, sampler):
    workflow = Workflow(cfg=4.0, latent=PICTURE, sampler=sampler, mask=True)
    names = ("CFGZeroStar", "TCFG", "CFGNorm before", "CFGNorm")
    in_the_pool(host, guided(workflow, *names), guided(workflow.on("cpu:3"), *names))


GUIDERS = {
    "DualCFGGuider regular": {"cfg_conds": 3.0, "cfg_cond2_negative": 4.0, "style": "regular"},
    "DualCFGGuider nested": {"cfg_conds": 3.0, "cfg_cond2_negative": 4.0, "style": "nested"},
    "DualCFGGuider without a negative": {"cfg_conds": 3.0, "cfg_cond2_negative": 1.0, "style": "regular"},
    "PerpNegGuider": {"cfg": 4.0, "neg_scale": 1.5},
    "PerpNegGuider without a negative": {"cfg": 4.0, "neg_scale": 0.0},
}
"""Nodes that give a guider of three conditionings, and their inputs."""


def with_guider(workflow: Workflow, name: str, *functions: str) -> Prompt:
    """By this guider, with these nodes on its MODEL."""
    graph = guided(workflow, *functions)
    kind = name.partition(" ")[0]
    third = node("TestRandomConditioning", seed=33, length=5, width=64, pooled=32, guidance=3.0)
    graph["third"] = third
    first, second = ("cond1", "cond2") if kind == "DualCFGGuider" else ("positive", "empty_conditioning")
    conds = {first: link("positive"), second: link("third"), "negative": link("negative")}
    graph["guider"] = node(kind, model=link(functions[-1] if functions else "model"), **conds, **GUIDERS[name])
    return graph


@pytest.mark.slow_but_for("DualCFGGuider regular-cpu:2")
@pytest.mark.parametrize("devices", ["cpu:1", "cpu:2"])
@pytest.mark.parametrize("name", GUIDERS)
def test_guiders_of_three_conditionings_run_in_the_ranks(host, name, devices):
    workflow = Workflow(sampler_node="SamplerCustomAdvanced", latent=PICTURE, sampler="dpmpp_2m")
    in_the_pool(host, with_guider(workflow, name), with_guider(workflow.on(devices), name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DualCFGGuider nested", "PerpNegGuider"])
def test_functions_and_guiders_run_together_over_a_batch_and_a_mask(host, name):
    workflow = Workflow(sampler_node="SamplerCustomAdvanced", latent=PICTURE, sampler="er_sde", mask=True)
    functions = ("CFGNorm", "SkipLayerGuidanceDiT")
    in_the_pool(host, with_guider(workflow, name, *functions), with_guider(workflow.on("cpu:3"), name, *functions))
