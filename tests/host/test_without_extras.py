"""A ComfyUI whose Python has no diffusers: ComfyUI's own network computes whatever artists load."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests import tiny_lora, tiny_sdxl
from tests.tiny_model import find_by_name, write_original

from .comfy_host import ComfyHost
from .comfyui_families import FAMILIES
from .find_host import SHIM, find_host
from .host_models import write_models
from .small_files import write_small_files
from .test_graph_stays_a_graph import pool_pids
from .workflow import SAVE, Prompt, Workflow, link, node, sampled_in_pool

pytestmark = [pytest.mark.host, pytest.mark.slow]

WITHOUT = """
import os, sys
sys.modules["diffusers"] = None  # is not found, nor can be imported
open(os.path.join({folder!r}, f"{{os.getpid()}}"), "w").close()
"""


@pytest.fixture(scope="module")
def without(tmp_path_factory) -> Iterator[ComfyHost]:
    """A running ComfyUI. Each of its Python processes leaves a file with its number in `started` beside its base."""
    folder = tmp_path_factory.mktemp("without")
    started = folder / "started"
    found = find_host()
    shim = (SHIM / "sitecustomize.py").read_text() if found.python_path else ""
    (folder / "sitecustomize.py").write_text(shim + WITHOUT.format(folder=str(started)))
    started.mkdir()
    comfy = ComfyHost(replace(found, python_path=str(folder)), folder / "comfyui")
    try:
        write_models(comfy)
        yield comfy
    finally:
        comfy.stop()


def compare(host: ComfyHost, native: Prompt, parallel: Prompt) -> list[tuple[str, str]]:
    """Assert that both graphs make the same latent; return what nodes of the second one showed."""
    ours = host.run(parallel)
    assert ours.error is None, ours.error
    latent, wanted = host.latent(ours, SAVE), host.latent(host.run(native), SAVE)
    assert wanted.std() > 0.1
    assert (latent - wanted).abs().max() < 1e-4 * wanted.abs().max()
    return ours.texts


def with_lora(prompt: Prompt) -> Prompt:
    prompt["before"] = prompt.pop("model")
    prompt["model"] = node(
        "LoraLoaderModelOnly", model=link("before"), lora_name="lora.safetensors", strength_model=0.8
    )
    return prompt


def test_flux_under_both_samplers_with_a_lora_too(without):
    workflow = Workflow(cfg=4.0, lengths=(9, 5))
    compare(without, workflow.prompt(), workflow.on("cpu:2").prompt())
    pool = pool_pids(without)
    assert len(pool) == 2
    assert {int(path.name) for path in (without.base.parent / "started").iterdir()} >= {without.process.pid, *pool}
    assert sampled_in_pool(compare(without, workflow.prompt(), workflow.on("cpu:2", "ParallelSampler").prompt()))
    folder = without.base / "models" / "loras"
    folder.mkdir(exist_ok=True)
    tiny_lora.write_lora(folder / "lora.safetensors", tiny_lora.FLUX if without.small_flux else tiny_lora.SD3)
    compare(without, with_lora(workflow.prompt()), with_lora(workflow.on("cpu:2").prompt()))


@pytest.mark.long
def test_a_family_that_comfyui_alone_has(without):
    assert write_small_files(without, without.base / "models" / "diffusion_models", ["krea-2"]) == {}
    workflow = Workflow(cfg=4.0, steps=2, model="krea-2.safetensors")
    family = FAMILIES["krea-2"]
    compare(without, family.graph(workflow), family.graph(workflow.on("cpu:2")))


@pytest.mark.long
def test_a_checkpoint(without):
    folder = without.base / "models" / "checkpoints"
    folder.mkdir(exist_ok=True)
    file = folder / "whole.safetensors"
    write_original(find_by_name("sdxl"), file, tiny_sdxl.recognised_config(), "model.diffusion_model.")
    graphs = []
    for loader in ("native", "cpu:2"):
        graph = Workflow(cfg=4.0, steps=2).on(loader).prompt()
        graph["latent"] = node("EmptyLatentImage", width=192, height=128, batch_size=1)
        for name in ("positive", "negative"):
            graph[name]["inputs"] |= {"width": 2048, "pooled": 1280}
        graphs.append(graph)
    native, parallel = graphs
    native["model"] = node("CheckpointLoaderSimple", ckpt_name=file.name)
    inputs = {"weight_dtype": "default", "parallel_config": link("config")}
    parallel["model"] = node("ParallelCheckpointLoader", ckpt_name=file.name, **inputs)
    compare(without, native, parallel)
