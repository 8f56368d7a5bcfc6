"""Parallel VAE in a real ComfyUI: its VAE gives what Load VAE's gives, to nodes with tiles the same as without."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from tests.comfyui_checkout import import_with_comfyui
from tests.comfyui_vaes.tiny import fill

from .test_next_prompt import BEGUN, ONE, SEEDS, queue, saved
from .workflow import SAVE, Prompt, Workflow, link, node

pytestmark = pytest.mark.host

TOLERANCE = 1e-4
"""Of the latent's scale."""
FLUX, WAN = "flux-vae.safetensors", "wan-vae.safetensors"
LATENTS = {FLUX: {"batch": 1, "height": 5, "width": 3}, WAN: {"batch": 1, "height": 7, "width": 6, "frames": 3}}
TILES = {"tile_size": 64, "overlap": 32, "temporal_size": 64, "temporal_overlap": 8}


@pytest.fixture(scope="module")
def vaes(host):
    """The session's ComfyUI, with VAEs as narrow as its loader takes them."""
    autoencoder, wan = import_with_comfyui("comfy.ldm.models.autoencoder", "comfy.ldm.wan.vae")
    sizes = {"double_z": True, "z_channels": 16, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128}
    sizes |= {"ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0}
    parts = "comfy.ldm.modules.diffusionmodules.model"
    flux = autoencoder.AutoencodingEngine(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
        encoder_config={"target": f"{parts}.Encoder", "params": sizes},
        decoder_config={"target": f"{parts}.Decoder", "params": {**sizes, "ch": 32}},
    )
    times = {"attn_scales": [], "temperal_downsample": [False, True, True], "dropout": 0.0, "num_res_blocks": 2}
    made = {FLUX: flux, WAN: wan.WanVAE(dim=16, z_dim=16, dim_mult=[1, 2, 4, 4], **times)}
    folder = host.base / "models" / "vae"
    folder.mkdir(exist_ok=True)
    for name, vae in made.items():
        save_file(fill(vae).state_dict(), folder / name)
    yield host
    for name in made:
        (folder / name).unlink()


def coded(name: str, devices: str = "", tiled: bool = False, before: str = "", behind: str = "") -> Prompt:
    """A latent, decoded and encoded again.

    Args:
        devices: of Parallel VAE; "" for the VAE as Load VAE gives it.
        before, behind: what Select VAE Device is set to there; "" for none.
    """
    graph = {
        "vae": node("VAELoader", vae_name=name),
        "latent": node("TestRandomLatent", seed=4, broken=False, **LATENTS[name]),
    }
    vae = link("vae")
    if before:
        graph["before"] = node("SelectVAEDevice", vae=vae, device=before)
        vae = link("before")
    if devices:
        graph["config"] = node("ParallelConfig", devices=devices)
        graph["parallel"] = node("ParallelVAE", vae=vae, parallel_config=link("config"))
        vae = link("parallel")
    if behind:
        graph["behind"] = node("SelectVAEDevice", vae=vae, device=behind)
        vae = link("behind")
    tiles = TILES if tiled else {}
    kind = "Tiled" if tiled else ""
    graph["picture"] = node(f"VAEDecode{kind}", samples=link("latent"), vae=vae, **tiles)
    graph["again"] = node(f"VAEEncode{kind}", pixels=link("picture"), vae=vae, **tiles)
    graph[SAVE] = node("SaveLatent", samples=link("again"), filename_prefix="latents/test")
    return graph


@pytest.mark.slow
@pytest.mark.parametrize("name", LATENTS)
def test_decodes_and_encodes_as_comfyui_does(vaes, name):
    wanted = vaes.latent(vaes.run(coded(name)), SAVE)
    run = vaes.run(coded(name, "cpu:2"))
    ours = vaes.latent(run, SAVE)
    assert wanted.std() > 0.01
    assert (ours - wanted).abs().max() < TOLERANCE * wanted.abs().max()
    told = [text for each, text in run.texts if each == "picture"]
    assert "Decoded; devices at work: 2." in told
    assert ("parallel", "Encodes and decodes on 2 devices, each with its rows of the picture.") in run.texts


@pytest.mark.slow
def test_nodes_with_tiles_decode_and_encode_whole(vaes):
    wanted = vaes.latent(vaes.run(coded(WAN)), SAVE)
    tiled = vaes.latent(vaes.run(coded(WAN, "cpu:2", tiled=True)), SAVE)
    assert (tiled - wanted).abs().max() < TOLERANCE * wanted.abs().max()


@pytest.mark.parametrize(
    "chosen",
    [{"before": "gpu:0"}, {"behind": "default"}, {"behind": "gpu:0"}, {"before": "default", "behind": "gpu:7"}],
)
def test_select_vae_device_may_stand_before_it_and_behind(vaes, chosen):
    if "SelectVAEDevice" not in vaes.get("/object_info"):
        pytest.skip("an older ComfyUI has no such node")
    wanted = vaes.latent(vaes.run(coded(FLUX)), SAVE)
    run = vaes.run(coded(FLUX, "cpu:2", **chosen))
    assert (vaes.latent(run, SAVE) - wanted).abs().max() < TOLERANCE * wanted.abs().max()
    assert ("picture", "Decoded; devices at work: 2.") in run.texts


def test_a_vae_without_a_file_is_refused(vaes):
    graph = coded(FLUX, "cpu:2")
    graph["vae"] = node("TestVae", channels=16, video=False)
    error = vaes.run(graph).error
    assert "not loaded from a file by Load VAE" in error["exception_message"]


@pytest.mark.slow
def test_a_picture_is_decoded_before_the_next_prompt_begins(vaes):
    def coded_after(seed: int, workflow: Workflow = ONE) -> Prompt:
        graph = saved(workflow, seed, "next")
        graph["file"] = node("VAELoader", vae_name=FLUX)
        graph["vae"] = node("ParallelVAE", vae=link("file"), parallel_config=link("config"))
        graph["picture"] = node("VAEDecode", samples=graph[SAVE]["inputs"]["samples"], vae=link("vae"))
        graph["again"] = node("VAEEncode", pixels=link("picture"), vae=link("vae"))
        graph[SAVE]["inputs"]["samples"] = link("again")
        return graph

    alone = [vaes.latent(vaes.run(coded_after(seed)), SAVE) for seed in SEEDS]
    together, texts = queue(vaes, [coded_after(100, replace(ONE, steps=60)), *map(coded_after, SEEDS)])
    assert all(map(torch.equal, together[1:], alone))
    assert sum(BEGUN in text for text in texts) == len(SEEDS) - 1
