"""What the VAE of Parallel VAE does where the pool has too little memory: what ComfyUI does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.emoji.autoencoder import Autoencoder
from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import OutOfMemoryError
from tests.comfyui_checkout import HOW, find_comfyui, import_with_comfyui

pytestmark = pytest.mark.skipif(find_comfyui() is None, reason=HOW)


class SmallPool:
    """A pool that runs the VAE here, and has no memory for more than so many places of a latent."""

    ran = None

    def __init__(self, vae: Any, most: int):
        self.refused = 0
        self._vae, self._most = vae, most

    def run_vae(self, request: Any, half: str, x: torch.Tensor, **_: Any) -> torch.Tensor:
        if x.shape[-2] * x.shape[-1] > self._most:
            self.refused += 1
            raise OutOfMemoryError("Too little memory.", "Close something.")
        return self._vae.first_stage_model.decode(x)


def test_what_does_not_fit_is_decoded_in_tiles_as_by_comfyui(tmp_path, monkeypatch):
    sd, remote_vae = import_with_comfyui("comfy.sd", "nodes.remote_vae")
    torch.manual_seed(0)
    file = tmp_path / "vae.safetensors"
    save_file({name: weight.contiguous() for name, weight in Autoencoder().state_dict().items()}, file)
    from safetensors.torch import load_file

    vae = sd.VAE(sd=load_file(file))
    vae.patcher.cached_patcher_init = (sd.load_vae_patcher, (str(file), None, None))
    monkeypatch.setattr(vae.first_stage_model, "decode", lambda x: torch.kron(x[:, :3], torch.ones(8, 8)))
    pool = SmallPool(vae, most=64 * 72)
    waits = SimpleNamespace(watching=lambda *_: lambda: False, end=lambda: None, tell=lambda text: None)
    notices = SimpleNamespace(waits=waits)
    remote = remote_vae.RemoteVae(vae, ParallelConfig(devices="cpu:2"), lambda config: pool, 2, notices)
    samples = torch.randn(1, 16, 72, 72)
    ours = remote_vae.ParallelVae(remote).decode(samples)
    assert pool.refused == 1
    assert torch.equal(ours, vae.decode_tiled_(samples).movedim(1, -1))
