"""What an engine does with decodes that repeat, for test_recorded_vae.py: recordings are pretended."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from parallel_runtime.engine import prepared_vae
from parallel_runtime.engine.engine import Engine
from parallel_runtime.networks.comfyui.comfy_code import use_comfyui
from parallel_runtime.requests.comfyui_code import ComfyuiCode
from parallel_runtime.requests.requests import RunVae, VaeFile
from parallel_runtime.vae import vae_weights
from parallel_runtime.vae.vae_weights import RecordedPart
from tests.comfyui_vaes.tiny import TINY, make
from tests.parallel_runtime.staged_run import Quiet
from tests.recorders import recorded_by

MEMORY = 1000
"""That a run is estimated to take."""


class Recorder:
    """Counts attempts to record, of which `fails` raise, and replays."""

    def __init__(self) -> None:
        self.attempts = self.replays = 0
        self.fails = False

    def __call__(self, call: Any, static: list[torch.Tensor], made_outside: Any) -> Any:
        self.attempts += 1
        if self.fails:
            raise RuntimeError("it cannot be captured")
        call(static)

        def replay(tensors: list[torch.Tensor]) -> Any:
            self.replays += 1
            return call(tensors)

        return replay


def decode(rank: int, world_size: int, comfyui: str, folder: str) -> dict[str, Any]:
    """Attempts and replays in some decodes of one latent, by what came before them; "same": on the first rank each
    gave what the VAE does by itself."""
    use_comfyui(comfyui, {"cpu": True})
    torch.set_grad_enabled(False)
    recorder, free = Recorder(), [MEMORY * 2]
    path = Path(folder) / "vae.safetensors"
    path.touch()
    file = VaeFile(str(path), False, "float32", 1, ComfyuiCode(comfyui, {"cpu": True}, "", False))
    request = RunVae("v", file, "decoder", world_size, memory=MEMORY * world_size)
    x = torch.randn(TINY["flux"].latent, generator=torch.Generator().manual_seed(1))
    wanted, same = make(TINY["flux"]).decode(x), True
    engine = Engine(torch.device("cpu"), rank, world_size)

    def after(times: int = 8) -> tuple[int, int]:
        nonlocal same
        recorder.attempts = recorder.replays = 0
        for _ in range(times):
            dist.barrier()  # all are through with the last one, as in a pool
            prepared = engine.prepare(request, {"x": x.to("meta")}, Quiet())
            _, made = prepared.run({"x": x.clone()}, Quiet(), dict(prepared.offers))  # all offer the same here
            if rank == 0:
                same &= float((made["output"] - wanted).abs().max()) < 1e-4 * float(wanted.abs().max())
        return recorder.attempts, recorder.replays

    def load(*_: Any) -> Any:
        return SimpleNamespace(first_stage_model=make(TINY["flux"]), downscale_ratio=8)

    with (
        mock.patch.object(vae_weights, "load_vae", load),
        mock.patch.object(vae_weights, "RecordedPart", side_effect=lambda: recorded_by(recorder, RecordedPart())),
        mock.patch.object(prepared_vae, "can_be_recorded", return_value=True),
        mock.patch.object(torch.cuda, "mem_get_info", side_effect=lambda device: (free[0], 2**40)),
    ):
        found: dict[str, Any] = {"nothing": after()}
        found["a replay"] = after(2)
        engine.residency.forget_runs()
        found["what runs left was let go"] = after(2)
        engine.residency.give_back("v")
        found["its weights were away"] = after()
        free[0] -= 1
        found["what it takes is free no more"] = after(2)
        engine.residency.forget_runs()
        found["and its recording was let go"] = after()
        free[0] += 1
        engine.residency.give_back("v")
        recorder.fails = True
        found["a recording fails"] = after(20)
        engine.residency.give_back("v")
        found["that, and its weights were away"] = after(20)
    return {"found": found, "same": same}
