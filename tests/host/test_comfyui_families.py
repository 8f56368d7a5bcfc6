"""Families through ComfyUI's own networks, in a real ComfyUI: the latents that Load Diffusion Model gives."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from dataclasses import replace

import psutil
import pytest
import torch

from .comfyui_families import FAMILIES, LARGE_FAMILIES
from .older_host import skip_as_older
from .small_files import write_small_files
from .workflow import SAMPLER, SAVE, Workflow, link, node, sampled_in_pool

pytestmark = pytest.mark.host

TOLERANCE = 1e-4
"""Of the latent's scale."""


@pytest.fixture(scope="module")
def write(host) -> Iterator[Callable[[str], str]]:
    """Makes a family's file; a large one goes when the next is asked for."""
    folder = host.base / "models" / "diffusion_models"
    written: set[str] = set()
    unknown: dict[str, str] = {}

    def remove(names: set[str]) -> None:
        if names & LARGE_FAMILIES.keys():  # the pool, which takes no GPU's memory here, would keep them all
            host.post("/free", {"unload_models": True, "free_memory": True})
        for name in names - unknown.keys():
            (folder / f"{name}.safetensors").unlink()
        written.difference_update(names)

    def write_file(name: str) -> str:
        remove((written & LARGE_FAMILIES.keys()) - {name})
        if name not in written:
            unknown.update(write_small_files(host, folder, [name]))
            written.add(name)
        if name in unknown:
            skip_as_older(host.host.path, f"does not know {name} ({unknown[name]})")
        return f"{name}.safetensors"

    yield write_file
    remove(set(written))


@pytest.fixture
def turn(tmp_path_factory) -> Iterator[Callable[[], None]]:
    """Call it to be the only one with a large file, whatever other workers of this run do."""
    with (tmp_path_factory.getbasetemp().parent / "large files").open("w") as lock:
        yield lambda: fcntl.flock(lock, fcntl.LOCK_EX)


OF_LONG = {
    *LARGE_FAMILIES,
    *("wan-t2v", "wan-fun-control", "wan-camera-22", "wan-scail", "hunyuan-image", "ovis", "longcat", "hunyuan-3d-2"),
    *("sd3", "sd15"),
}
"""Of the small ones those that have a relative with the same inputs, and those that other host tests have."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long if name in OF_LONG else ()) for name in (*FAMILIES, *LARGE_FAMILIES)],
)
def test_families_give_comfyuis_latent_with_tokens_shared_out_and_branches_dealt(host, write, turn, name):
    family = (FAMILIES | LARGE_FAMILIES)[name]
    if name in LARGE_FAMILIES:
        turn()
    file = write(name)
    # On a CPU float8 becomes float32: in ComfyUI, and in both ranks.
    needed = 3 * 4 * (host.base / "models" / "diffusion_models" / file).stat().st_size
    if name in LARGE_FAMILIES and psutil.virtual_memory().available < needed + (4 << 30):
        pytest.skip(f"needs {(needed >> 30) + 4} GiB of free memory")
    alone = Workflow(model=file, steps=2)
    both = replace(alone, cfg=4.0)
    runs_of_theirs = {each: host.run(family.graph(each)) for each in (alone, both)}
    if failed := next((run.error["exception_message"] for run in runs_of_theirs.values() if run.error), ""):
        skip_as_older(host.host.path, f"fails with {name} by itself: {failed.splitlines()[0]}")
    expected = {each: host.latent(run, SAVE) for each, run in runs_of_theirs.items()}
    guided = (expected[both] - expected[alone]).abs().max() / expected[alone].abs().max()
    assert guided > 100 * TOLERANCE  # or else a wrong text would not show
    runs = [
        (alone, host.run(family.graph(alone.on("cpu:2")))),
        (both, host.run(family.graph(both.on("cpu:2")))),
        (both, in_pool := host.run(family.graph(both.on("cpu:2", "ParallelSampler")))),
    ]
    for workflow, run in runs:
        latent, wanted = host.latent(run, SAVE), expected[workflow]
        assert wanted.std() > 0.1
        assert latent.shape == wanted.shape
        last_place = 4 * family.sigma * torch.finfo(torch.float32).eps
        assert (latent - wanted).abs().max() < max(TOLERANCE * wanted.abs().max(), last_place)
    assert sampled_in_pool(in_pool.texts) == (not family.per_step), in_pool.texts
    assert any(node == SAMPLER and family.per_step in text for node, text in in_pool.texts), in_pool.texts


@pytest.mark.slow_but_for("cpu:2")
@pytest.mark.parametrize("devices", ["cpu:1", "cpu:2"])
def test_a_guider_with_a_scale_for_sound_of_its_own_runs_in_the_pool(host, write, devices):
    workflow = Workflow(
        model=write("ltx-2"),
        steps=2,
        sampler_node="SamplerCustomAdvanced",
        sampler="euler_ancestral",
    )
    latents = []
    for each in (workflow, workflow.on(devices)):
        graph = FAMILIES["ltx-2"].graph(each)
        conds = {"positive": link("positive"), "negative": link("negative")}
        graph["guider"] = node("LTXVDualCFGGuider", model=link("model"), video_cfg=3.0, audio_cfg=5.0, **conds)
        latents.append(host.latent(host.run(graph), SAVE))
    assert (latents[0] - latents[1]).abs().max() < TOLERANCE * latents[0].abs().max()
    assert host.last_run()["loop"] == "pool", host.last_run()["why"]


@pytest.mark.long_but_for("cpu:2")
@pytest.mark.slow
@pytest.mark.parametrize("devices", ["cpu:1", "cpu:2"])
def test_guidance_away_from_a_sound_that_is_left_out_runs_in_the_pool(host, write, devices):
    workflow = Workflow(model=write("ltx-2"), steps=4, cfg=3.0)
    latents = []
    for scale, each in ((0.0, workflow), (3.0, workflow), (3.0, workflow.on(devices))):
        graph = replace(FAMILIES["ltx-2"], mask=False).graph(each)
        graph["sound"] = node("EmptyAudio", duration=1.0, sample_rate=44100, channels=2)
        graph["vae"] = node("TestAudioVae")
        given = {name: link(name) for name in ("model", "positive", "negative")}
        settings = {"identity_guidance_scale": scale, "start_percent": 0.0, "end_percent": 0.8}
        graph["voice"] = node(
            "LTXVReferenceAudio", **given, reference_audio=link("sound"), audio_vae=link("vae"), **settings
        )
        graph[SAMPLER]["inputs"] |= {name: link("voice", output) for output, name in enumerate(given)}
        latents.append(host.latent(host.run(graph), SAVE))
    plain, wanted, ours = latents
    assert (wanted - plain).abs().max() > 100 * TOLERANCE * wanted.abs().max()  # or else nothing would be tested
    assert (ours - wanted).abs().max() < TOLERANCE * wanted.abs().max()
    assert host.last_run()["loop"] == "pool", host.last_run()["why"]
