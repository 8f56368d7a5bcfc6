"""SD3 and FLUX.2 in a real ComfyUI: Parallel Loader gives the latents that Load Diffusion Model gives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallel_runtime.networks.diffusers.flux2 import FLUX2
from parallel_runtime.networks.diffusers.sd3 import SD3
from tests import tiny_flux2, tiny_sd3
from tests.tiny_model import write_diffusers_folder, write_original

from .test_same_picture import compare
from .workflow import Workflow, sampled_in_pool

pytestmark = pytest.mark.host

FAMILIES = {
    "sd3": (SD3, tiny_sd3.tiny_config(), "StableDiffusion3Pipeline"),
    "flux2": (FLUX2, tiny_flux2.tiny_config(), "Flux2Pipeline"),
}


@pytest.fixture(scope="module")
def families(host):
    """The session's ComfyUI, with tiny files of these families in both layouts."""
    models = host.base / "models"
    for name, (spec, config, pipeline) in FAMILIES.items():
        write_original(spec, models / "diffusion_models" / f"{name}.safetensors", config)
        write_diffusers_folder(spec, models / "diffusers" / name, config, pipeline=pipeline)
    return host


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_unequal_prompts_with_cfg_give_the_same_latent_in_both_layouts(families, name):
    workflow = Workflow(model=f"{name}.safetensors", cfg=4.0, lengths=(9, 5), latent=(0, 1, 9, 7))
    compare(families, workflow, workflow.on("cpu:2"))
    texts = compare(families, workflow, replace(workflow.on("cpu:2", "ParallelSampler"), model=f"{name}/"))
    assert sampled_in_pool(texts)
