"""A VAE in a pool of two ranks: its memory is told and given back, a cancel is heard, what cannot be run is refused."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from nodes.panel.actions import ACTIONS
from nodes.panel.status import read_status
from nodes.run_notices import RunNotices
from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import CheckpointError, OutOfMemoryError, RequestError, UnsupportedModelError
from parallel_runtime.requests.comfyui_code import ComfyuiCode
from parallel_runtime.requests.control import Cancelled
from parallel_runtime.requests.requests import VaeFile
from tests.comfyui_checkout import HOW, find_comfyui, import_with_comfyui
from tests.comfyui_vaes.tiny import fill
from workers.client.client import PoolClient
from workers.client.node_requests import VaeRequest
from workers.launch import PoolSpec

COMFYUI = find_comfyui()
pytestmark = [pytest.mark.skipif(COMFYUI is None, reason=HOW), pytest.mark.slow]
SIZE = 1 << 20
LAST_CALL = -1
"""The gather at the end, once it is through."""


@pytest.fixture(scope="module")
def vae():
    """Wan's, in this process."""
    (wan,) = import_with_comfyui("comfy.ldm.wan.vae")
    times = {"attn_scales": [], "temperal_downsample": [False, True, True], "dropout": 0.0, "num_res_blocks": 2}
    return fill(wan.WanVAE(dim=16, z_dim=16, dim_mult=[1, 2, 4, 4], **times))


@pytest.fixture(scope="module")
def path(vae, tmp_path_factory):
    file = tmp_path_factory.mktemp("vae") / "wan.safetensors"
    save_file(vae.state_dict(), file)
    return file


@pytest.fixture(scope="module")
def client():
    client = PoolClient(PoolSpec("cpu", (0, 1)))
    yield client
    client.close()


def request_for(path: Path) -> VaeRequest:
    return VaeRequest(VaeFile(str(path), False, "float32", SIZE, ComfyuiCode(str(COMFYUI))), 2)


def test_weights_come_and_go(client, path, vae):
    latent = torch.randn(1, 16, 3, 7, 6, generator=torch.Generator().manual_seed(1))
    request = request_for(path)
    with torch.inference_mode():
        wanted = vae.decode(latent)
    for _ in range(2):
        ours = client.run_vae(request, "decoder", latent, answer_bytes=wanted.nbytes)
        assert (ours - wanted).abs().max() < 1e-5 * wanted.abs().max()
        assert client.ran.plan == "Decoded; devices at work: 2."
        assert path.stat().st_size * 0.99 < client.held_bytes(request) < path.stat().st_size * 1.01
        client.release(request)
        assert client.held_bytes(request) == 0


def test_an_answer_goes_where_there_is_memory_for_it_and_nowhere_else(client, path, vae):
    latent = torch.randn(1, 16, 3, 7, 6, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted = vae.decode(latent)
    frames = torch.zeros(2, *wanted.shape[1:], dtype=torch.float64)
    ours = client.run_vae(request_for(path), "decoder", latent, answer_bytes=wanted.nbytes, into=frames[1:])
    assert ours.data_ptr() == frames[1:].data_ptr()
    assert (frames[1:] - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert not frames[0].any()
    with pytest.raises(RequestError, match=r"The workers made \(1, 3, 9, 56, 48\), not \(1, 3, 8, 56, 48\)"):
        client.run_vae(request_for(path), "decoder", latent, into=torch.zeros(1, 3, 8, 56, 48))
    client.run_vae(request_for(path), "decoder", latent, into=frames[:1])
    assert torch.equal(*frames)


def test_the_status_lists_it_and_its_actions_free_it(client, path, monkeypatch):
    monkeypatch.setattr("workers.client.pool_registry.known_pools", lambda: [client])
    monkeypatch.setattr("nodes.panel.status.host_notes", list)
    latent = torch.zeros(1, 16, 1, 7, 6)
    for action, wishes in ((ACTIONS["park"], {"model": path.name}), (ACTIONS["unload"], {})):
        client.run_vae(request_for(path), "decoder", latent)
        (listed,) = read_status()["pools"][0]["models"]
        assert (listed["name"], listed["family"], listed["state"]) == (path.name, "VAE", "resident")
        assert listed["bytes_per_rank"] == client.held_bytes(request_for(path)) > 0
        ACTIONS["park"]({"model": "other.safetensors"})
        assert read_status()["pools"][0]["models"] == [listed]
        action(wishes)
        assert read_status()["pools"][0]["models"] == []


def test_a_latent_of_few_rows_is_run_by_one(client, path, vae):
    latent = torch.randn(1, 16, 1, 3, 6, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted = vae.decode(latent)
    ours = client.run_vae(request_for(path), "decoder", latent)
    assert (ours - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert client.ran.plan == "Decoded; devices at work: 1."


def test_a_cancel_is_heard_within_a_run(client, path):
    long = torch.randn(1, 16, 9, 40, 40, generator=torch.Generator().manual_seed(1))
    request, pool = request_for(path), client.start()
    client.run_vae(request, "decoder", long[:, :, :1, :7, :6])
    asked: list[int] = []

    def after_a_while() -> bool:
        asked.append(1)
        return len(asked) > 20

    with pytest.raises(Cancelled):
        client.run_vae(request, "decoder", long, should_cancel=after_a_while)
    client.run_vae(request, "decoder", long[:, :, :1, :7, :6])
    assert client.start() is pool, "the pool went on"


def test_what_cannot_be_run_is_refused_and_the_pool_goes_on(client, path, tmp_path):
    latent, pool = torch.zeros(1, 16, 1, 7, 6), client.start()
    with pytest.raises(RequestError, match="shape"):
        client.run_vae(request_for(path), "decoder", torch.zeros(4, 4))
    with pytest.raises(RequestError, match="empty"):
        client.run_vae(request_for(path), "decoder", latent[:0])
    with pytest.raises(CheckpointError, match="does not exist"):
        client.run_vae(request_for(tmp_path / "gone.safetensors"), "decoder", latent)
    other = tmp_path / "other.safetensors"
    save_file({"weight": torch.zeros(2)}, other)
    with pytest.raises(UnsupportedModelError, match="no VAE"):
        client.run_vae(request_for(other), "decoder", latent)
    client.run_vae(request_for(path), "decoder", latent)
    assert client.start() is pool


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """The file that names what goes wrong."""
    monkeypatch.setenv("TEST_VAE_FAULT", str(tmp_path / "fault"))
    return tmp_path / "fault"


@pytest.fixture
def faulty(planted):
    """A pool of ranks that read it."""
    client = PoolClient(PoolSpec("cpu", (0, 1)), "tests.workers.faulty_vae_rank")
    yield client
    client.close()


def test_where_one_rank_fails_all_do_and_the_pool_goes_on(path, planted, faulty):
    latent = torch.randn(1, 16, 3, 7, 6, generator=torch.Generator().manual_seed(1))
    wanted = faulty.run_vae(request_for(path), "decoder", latent)
    pool = faulty.start()
    for fault, error, says in (
        ("memory", OutOfMemoryError, "worker {rank}.*ran out of memory"),
        ("other", RequestError, "failed with ValueError: planted fault"),
    ):
        for rank, call in ((0, 0), (1, 7), (0, LAST_CALL), (1, LAST_CALL)):
            for there in faulty.vaes:
                faulty.release(there)  # else it has run, and nobody votes
            planted.write_text(f"{fault} {rank} {call}")
            begun = time.monotonic()
            with pytest.raises(error, match=says.format(rank=rank)):
                faulty.run_vae(request_for(path), "decoder", latent)
            assert time.monotonic() - begun < 5
    ours = faulty.run_vae(request_for(path), "decoder", latent)
    assert torch.equal(ours, wanted)
    assert faulty.start() is pool


def load_and_share(path: Path, pool: PoolClient):
    """ComfyUI's VAE, and ours of it."""
    sd, remote_vae, utils = import_with_comfyui("comfy.sd", "nodes.remote_vae", "comfy.utils")
    vae = sd.VAE(sd=utils.load_torch_file(str(path)), device=torch.device("cpu"))
    vae.patcher.cached_patcher_init = sd.load_vae_patcher, (str(path), None, None)
    return vae, share(remote_vae, vae, pool)


def share(remote_vae, vae, pool: PoolClient):
    config = ParallelConfig(devices="cpu:2")
    return remote_vae.ParallelVae(remote_vae.RemoteVae(vae, config, lambda _: pool, 2, RunNotices(lambda _: None)))


def test_comfyui_decodes_in_tiles_where_a_rank_has_too_little_memory(path, planted, faulty):
    latent = torch.randn(1, 16, 3, 7, 6, generator=torch.Generator().manual_seed(1))
    vae, ours = load_and_share(path, faulty)
    with torch.inference_mode():
        wanted = vae.decode(latent)
        planted.write_text("memory 1 7")
        assert (ours.decode(latent) - wanted).abs().max() < 1e-4 * wanted.abs().max()
    assert not planted.exists()


def test_comfyui_has_memory_ready_where_it_knows_how_large_a_picture_is(client, path):
    vae, ours = load_and_share(path, client)
    network, latent = ours.first_stage_model, torch.zeros(2, 16, 3, 7, 6)
    assert network.comfy_has_chunked_io
    with torch.inference_mode():
        assert network.decode_output_shape(latent.shape) == tuple(vae.first_stage_model.decode(latent).shape)
    vae.conv_out_channels = 12
    assert not network.comfy_has_chunked_io


def test_another_gpu_that_a_node_selects_is_comfyuis_before_it_and_has_no_effect_behind(client, path, monkeypatch):
    management, node, remote_vae = import_with_comfyui(
        "comfy.model_management", "comfy_extras.nodes_multigpu", "nodes.remote_vae"
    )
    latent = torch.randn(1, 16, 1, 7, 6, generator=torch.Generator().manual_seed(1))
    vae, ours = load_and_share(path, client)
    with torch.inference_mode():
        wanted = vae.decode(latent)
    other = torch.device("cuda", 1)
    monkeypatch.setattr(management, "resolve_gpu_device_option", lambda _: other)
    monkeypatch.setattr(management, "get_free_memory", lambda *_, torch_free_too=False: (
        (1 << 40, 0) if torch_free_too else 1 << 40
    ))  # fmt: skip
    said: list[str] = []
    monkeypatch.setattr(node.logging, "warning", lambda text, *_: said.append(text))

    (before,) = node.SelectVAEDeviceNode.execute(vae, "gpu:1").result
    assert before.patcher.load_device == other
    (behind,) = node.SelectVAEDeviceNode.execute(ours, "gpu:1").result
    assert behind.patcher.load_device == torch.device("cpu")
    assert len(said) == 1
    assert "runs on the devices of Parallel VAE" in said[0]
    for each in (share(remote_vae, before, client), behind, ours):
        client.ran = None
        with torch.inference_mode():
            assert (each.decode(latent) - wanted).abs().max() < 1e-4 * wanted.abs().max()
            again = each.encode(wanted[0])
            assert (again - vae.encode(wanted[0])).abs().max() < 1e-4 * again.abs().max()
        assert client.ran.plan == "Encoded; devices at work: 2."
    for there in client.vaes:
        client.release(there)


def test_a_node_that_changes_its_weights_is_refused_and_one_that_uses_the_network_gets_comfyuis(client, path):
    management, node = import_with_comfyui("comfy.model_management", "comfy_extras.nodes_model_patch")
    vae, ours = load_and_share(path, client)
    changed = SimpleNamespace(model=SimpleNamespace(denoise_encoder_sd={"conv1.bias": torch.zeros(16)}))
    with pytest.raises(RequestError, match="changes weights of the VAE"):
        node.SUPIRApply._encode_with_denoise_encoder(ours, changed, torch.zeros(1, 16, 16, 3))
    ours.prepare_decode(torch.Size((1, 16, 1, 7, 6)))
    assert any(vae.patcher.is_clone(each) for each in management.loaded_models())
    assert ours.first_stage_model.decoder is vae.first_stage_model.decoder


def test_a_model_that_comes_or_goes_is_no_vae(client, path, vae):
    """Ranks tell what they hold before a load is answered, and the status may be asked for meanwhile."""
    request = request_for(path)
    client.run_vae(request, "decoder", torch.zeros(1, 16, 1, 7, 6))
    client._models.held = {**client._models.held, "a model": 5}
    assert client.vaes == [request]
    client.release(request)
