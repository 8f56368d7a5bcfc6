"""What a rank does for tests of VAEs: run one with the others, beside the VAE alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from parallel_runtime.networks.comfyui.comfy_code import use_comfyui
from parallel_runtime.vae.shared_vae import run_half, shared_ranks
from tests.comfyui_vaes.tiny import TINY, make


def compare(rank: int, world_size: int, comfyui: str, names: list[str]) -> dict[str, Any]:
    """Largest difference to the VAE alone, as part of its largest number, by VAE and half; and how many ranks ran."""
    use_comfyui(comfyui, {"cpu": True})
    found: dict[str, dict[str, float]] = {}
    ran: dict[str, int] = {}
    with torch.inference_mode():
        for name in names:
            tiny, vae = TINY[name], make(TINY[name])
            for half, shape, unit in (("decoder", tiny.latent, 1), ("encoder", tiny.picture, tiny.unit)):
                if shape is None:
                    continue
                x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
                torch.manual_seed(2)
                ranks = ran[f"{name} {half}"] = shared_ranks(vae, half, shape, unit, world_size)
                group = dist.group.WORLD
                ours = run_half(vae, half, x.clone(), unit=unit, ranks=ranks, rank=rank, group=group)
                if ours is None:
                    continue
                torch.manual_seed(2)
                alone = vae.decode(x) if half == "decoder" else vae.encode(x)
                assert ours.shape == alone.shape
                found.setdefault(name, {})[half] = float((ours - alone).abs().max() / alone.abs().max())
    return {"differences": found, "ran": ran}
