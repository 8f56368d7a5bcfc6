"""ComfyUI's VAE nodes over a VAE that a pool runs, without a pool."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from nodes.run_notices import RunNotices
from parallel_runtime.config import ParallelConfig
from tests.comfyui_checkout import HOW, find_comfyui, import_with_comfyui
from tests.comfyui_vaes.tiny import TINY, make

pytestmark = [pytest.mark.skipif(find_comfyui() is None, reason=HOW), pytest.mark.slow]


class Answering:
    """Stands for a pool that decodes by a network of this process."""

    ran = None

    def __init__(self, network: torch.nn.Module):
        self.network, self.room = network, 0

    def run_vae(self, vae, half, x, *, answer_bytes, into, **how):
        made = self.network.decode(x)
        self.room = answer_bytes - made.nbytes
        return into.copy_(made)

    def held_bytes(self, vae):
        return 0


def test_a_vae_with_tiles_of_its_own_writes_to_memory_that_is_ready_and_has_room_for_its_answer(monkeypatch):
    sd, remote_vae, h3 = import_with_comfyui("comfy.sd", "nodes.remote_vae", "comfy.ldm.minimax.vae")
    network = make(TINY["h3"])
    small = partial(h3.ViT3DDecoder, num_layers=2, heads=4)
    monkeypatch.setattr(h3, "ViT3DDecoder", small)
    monkeypatch.setattr(
        h3, "MiniMaxH3VideoVAE", partial(h3.MiniMaxH3VideoVAE, ch=32, tile_size=64, tile_overlap_min=16)
    )
    vae = sd.VAE(sd=dict(network.state_dict()), device=torch.device("cpu"), dtype=torch.bfloat16)
    vae.patcher.cached_patcher_init = sd.load_vae_patcher, ("h3.safetensors", None, None)
    pool = Answering(vae.first_stage_model)
    given = ParallelConfig(devices="cpu:2"), lambda _: pool, 2, RunNotices(lambda _: None)
    ours = remote_vae.ParallelVae(remote_vae.RemoteVae(vae, *given))
    for frames in (1, 4, 7):
        latent = torch.randn(1, 24, frames, 7, 5, generator=torch.Generator().manual_seed(frames))
        with torch.inference_mode():
            assert torch.equal(ours.decode(latent), vae.decode(latent))
        assert pool.room == 0
    assert "each with some of the picture's tiles" in str(remote_vae.describe(ours.remote))
