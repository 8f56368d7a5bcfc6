"""Every sampler of this ComfyUI, under every node that samples: its loop runs in the pool, with the same latent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import pytest
import torch

from .older_host import name_version
from .test_same_picture import PICTURE
from .workflow import FIRST, SAMPLER, SAVE, Prompt, Workflow, link, node

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
OF_CI = "er_sde"
"""The sampler whose rows CI has: of those that official templates use most, one that ComfyUI's own function runs."""
NODES = {
    "KSampler": Workflow(),
    "KSampler, cfg, a batch": Workflow(cfg=4.0, lengths=(9, 5), latent=(0, 2, 14, 20)),
    "KSampler, a mask, denoise 0.6": Workflow(cfg=4.0, latent=PICTURE, mask=True, denoise=0.6),
    "KSampler Advanced, start and end": Workflow(sampler_node="KSamplerAdvanced", cfg=4.0, latent=PICTURE, steps=6),
    "SamplerCustomAdvanced": Workflow(sampler_node="SamplerCustomAdvanced", cfg=4.0),
    "SamplerCustomAdvanced, split sigmas, a batch": Workflow(
        sampler_node="SamplerCustomAdvanced", cfg=4.0, latent=(9, 2, 14, 20), steps=6, split=3
    ),
    "SamplerCustom, split sigmas, a mask": Workflow(
        sampler_node="SamplerCustom", cfg=4.0, latent=PICTURE, mask=True, steps=6, split=2
    ),
}
DEVICES = [pytest.param("cpu:1", marks=pytest.mark.long), "cpu:2"]
OF_FORMATS = {"scaled fp8": "scaled_fp8", "int8": "int8_tensorwise"}
FILES = {
    "ComfyUI": Workflow(),
    "scaled fp8": Workflow(model=f"{OF_FORMATS['scaled fp8']}.safetensors"),
    "int8": Workflow(model=f"{OF_FORMATS['int8']}.safetensors", attention="ComfyUI"),
    "GGUF": Workflow(model="Q8_0.gguf"),
}
"""Formats of one model. int8 turns last bits into levels of quantisation, so it is on one rank alone, with
ComfyUI's attention."""


@dataclass(frozen=True)
class Row:
    """A row of the table: a name in FILES, ranks, a name in NODES, and one of SAMPLERS."""

    file: str
    ranks: int
    by: str
    sampler: str

    @property
    def id(self) -> str:
        """Its test's name."""
        return f"{self.file}-{self.ranks}-{self.by}-{self.sampler}"

    @property
    def marks(self) -> tuple[pytest.MarkDecorator, ...]:
        """Its tier."""
        if self.ranks == 1 or self.sampler != OF_CI:
            return (pytest.mark.long,)
        return () if self.by == "KSampler, cfg, a batch" else (pytest.mark.slow,)

    @property
    def workflow(self) -> Workflow:
        """With Load Diffusion Model."""
        return replace(NODES[self.by], sampler=self.sampler, model=FILES[self.file].model)

    @property
    def parallel(self) -> Workflow:
        """Over the ranks."""
        return replace(self.workflow, loader=f"cpu:{self.ranks}", attention=FILES[self.file].attention)


def rows() -> Iterator[Row]:
    """One rank: every sampler with every file, under a node each. On two and three: every sampler under every node, and
    with every file but int8's, and every other pair of two of these."""
    files, nodes = list(FILES), list(NODES)
    for (f, file), (s, sampler) in product(enumerate(files), enumerate(SAMPLERS)):
        yield Row(file, 1, nodes[(f + s) % len(nodes)], sampler)
    files.remove("int8")
    shared = [
        Row(files[(n + s) % len(files)], 2 + (s // len(files) + n) % 2, by, sampler)
        for (n, by), (s, sampler) in product(enumerate(nodes), enumerate(SAMPLERS))
    ]
    yield from sorted(shared, key=lambda row: (-row.ranks, files.index(row.file)))  # models stay loaded, in one pool


GUIDANCE = {
    "CFGNorm": {"strength": 0.8, "pre_cfg": False},
    "CFGNorm before": {"strength": 0.7, "pre_cfg": True},
    "CFGOverride": {"cfg": 1.0, "start_percent": 0.0, "end_percent": 0.5},
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
IN_ORDER = ("CFGZeroStar", "TCFG", "CFGNorm before", "CFGNorm")
BESIDE_A_GUIDER = ("CFGNorm", "SkipLayerGuidanceDiT")
TOGETHER = {*IN_ORDER, *BESIDE_A_GUIDER, "VideoTriangleCFGGuidance"}
"""Each alone is in the tests before a release; VideoLinearCFGGuidance is another function of the same kind."""


@pytest.fixture(scope="module")
def native(host) -> Callable[[Workflow], torch.Tensor]:
    """Load Diffusion Model's latents, each made once."""
    return cache(lambda workflow: host.latent(host.run(workflow.prompt()), SAVE))


def gives_in_the_pool(host, wanted: torch.Tensor, parallel: Prompt) -> None:
    """Assert that loops in the pool give Load Diffusion Model's latent, to 1e-4 of its scale."""
    latent = host.latent(host.run(parallel), SAVE)
    assert wanted.std() > 0.1
    assert (latent - wanted).abs().max() < 1e-4 * max(1.0, float(wanted.abs().max()))
    for run in host.get("/parallel_dit/status")["runs"][: 2 if FIRST in parallel else 1]:
        assert run["loop"] == "pool", run["why"]


def in_the_pool(host, workflow: Prompt, parallel: Prompt) -> None:
    """The same, with Load Diffusion Model's latent made here."""
    gives_in_the_pool(host, host.latent(host.run(workflow), SAVE), parallel)


@pytest.mark.slow
@pytest.mark.parametrize("row", [pytest.param(row, id=row.id, marks=row.marks) for row in rows()])
def test_every_sampler_runs_in_the_pool_under_every_node(host, native, request, row):
    if row.file == "GGUF":
        request.getfixturevalue("gguf")
    elif row.file in OF_FORMATS and not request.getfixturevalue("has_format")(OF_FORMATS[row.file]):
        pytest.skip(f"{name_version(host.host.path)} has no {row.file}")
    gives_in_the_pool(host, native(row.workflow), row.parallel.prompt())


def test_the_table_has_every_sampler_of_this_comfyui(host):
    assert {*host.get("/object_info/KSampler")["KSampler"]["input"]["required"]["sampler_name"][0]} <= {*SAMPLERS}


@pytest.mark.slow
@pytest.mark.parametrize("devices", DEVICES)
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


@pytest.mark.slow
@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in TOGETHER else ()) for name in GUIDANCE]
)
def test_functions_around_guidance_run_in_the_ranks(host, native, name, devices):
    workflow = Workflow(cfg=4.0, latent=PICTURE, sampler="res_multistep", mask=name == "DifferentialDiffusion")
    changed = host.latent(host.run(guided(workflow, name)), SAVE)
    assert (changed - native(workflow)).abs().max() > 0.01  # or else nothing would be tested
    gives_in_the_pool(host, changed, guided(workflow.on(devices), name))


@pytest.mark.long_but_for("euler", "euler_cfg_pp")
@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["euler", "euler_ancestral", "euler_cfg_pp"])
def test_several_functions_around_guidance_run_in_their_order(host, sampler):
    workflow = Workflow(cfg=4.0, latent=PICTURE, sampler=sampler, mask=True)
    in_the_pool(host, guided(workflow, *IN_ORDER), guided(workflow.on("cpu:3"), *IN_ORDER))


GUIDERS = {
    "DualCFGGuider regular": {"cfg_conds": 3.0, "cfg_cond2_negative": 4.0, "style": "regular"},
    "DualCFGGuider nested": {"cfg_conds": 3.0, "cfg_cond2_negative": 4.0, "style": "nested"},
    "DualCFGGuider without a negative": {"cfg_conds": 3.0, "cfg_cond2_negative": 1.0, "style": "regular"},
    "PerpNegGuider": {"cfg": 4.0, "neg_scale": 1.5},
    "PerpNegGuider without a negative": {"cfg": 4.0, "neg_scale": 0.0},
}
"""Nodes that give a guider of three conditionings, and their inputs."""
WITH_FUNCTIONS = ("DualCFGGuider nested", "PerpNegGuider")
"""In CI together with functions around guidance."""


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


@pytest.mark.slow
@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in WITH_FUNCTIONS else ()) for name in GUIDERS]
)
def test_guiders_of_three_conditionings_run_in_the_ranks(host, name, devices):
    workflow = Workflow(sampler_node="SamplerCustomAdvanced", latent=PICTURE, sampler="dpmpp_2m")
    in_the_pool(host, with_guider(workflow, name), with_guider(workflow.on(devices), name))


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_FUNCTIONS)
def test_functions_and_guiders_run_together_over_a_batch_and_a_mask(host, name):
    workflow = Workflow(sampler_node="SamplerCustomAdvanced", latent=PICTURE, sampler="er_sde", mask=True)
    parallel = with_guider(workflow.on("cpu:3"), name, *BESIDE_A_GUIDER)
    in_the_pool(host, with_guider(workflow, name, *BESIDE_A_GUIDER), parallel)
