"""The peak of memory that a rank of Parallel VAE needs beside the weights, by how many share a picture.

    python -m benchmarks.vae_memory --comfyui ~/ComfyUI
    torchrun --nproc-per-node 2 -m benchmarks.vae_memory --comfyui ~/ComfyUI

VAEs of real size, bfloat16. The first runs each rank's part alone, with neighbours' rows that nobody sends: on a GPU by
what PyTorch's allocator gave, workspaces of kernels included; without one by what tensors of no memory would take.
The second is on GPUs, with the exchange; what NCCL takes is not in it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from parallel_runtime.networks.comfyui.comfy_code import use_comfyui
from parallel_runtime.vae import rows
from parallel_runtime.vae.shared_vae import CHUNK, run_half

from .in_comfyui.vae_files import MAKERS
from .live_bytes import LiveBytes


class Case(NamedTuple):
    """What is encoded or decoded.

    Args:
        vae: of MAKERS.
        shape: of what goes in.
        unit: rows of that for one of the latent.
    """

    vae: str
    half: str
    shape: tuple[int, ...]
    unit: int = 1


CASES = {
    "FLUX decodes 1024²": Case("flux", "decoder", (1, 16, 128, 128)),
    "FLUX decodes 2048²": Case("flux", "decoder", (1, 16, 256, 256)),
    "FLUX encodes 2048²": Case("flux", "encoder", (1, 3, 2048, 2048), 8),
    "Wan 2.1 decodes 832 × 480, 81 frames": Case("wan", "decoder", (1, 16, 21, 60, 104)),
    "Wan 2.1 decodes 1280 × 720, 81 frames": Case("wan", "decoder", (1, 16, 21, 90, 160)),
    "Wan 2.1 encodes 832 × 480, 81 frames": Case("wan", "encoder", (1, 3, 81, 480, 832), 8),
    "LTX decodes 768 × 512, 97 frames": Case("ltx", "decoder", (1, 128, 13, 16, 24)),
}


def make_vae(name: str, device: torch.device) -> nn.Module:
    """One of MAKERS, as the ranks have it; ComfyUI is importable already."""
    from comfy.ldm.modules.diffusionmodules.model import pytorch_attention

    with device:
        vae = MAKERS[name]().to(torch.bfloat16).eval().requires_grad_(False)
    for module in vae.modules() if device.type == "meta" else ():
        if hasattr(module, "optimized_attention"):
            module.optimized_attention = pytorch_attention  # as ComfyUI has it on a GPU
    return vae


@contextlib.contextmanager
def _large_chunks() -> Iterator[None]:
    """Inside, LTX's code computes as much at once as on a large GPU; it asks for memory that "meta" has not."""
    from comfy.ldm.lightricks.vae import causal_video_autoencoder

    with patch.object(causal_video_autoencoder, "get_max_chunk_size", lambda device: CHUNK):
        yield


@contextlib.contextmanager
def lone() -> Iterator[None]:
    """Inside, a rank exchanges with nobody: rows that it would get have their memory, and hold anything."""
    nobody = SimpleNamespace(
        P2POp=_Message, isend=None, irecv=None, batch_isend_irecv=lambda messages: messages,
        all_gather_into_tensor=lambda all, own, group, async_op: _Message(None, own, 0, group),
        all_reduce=lambda numbers, group: None,
    )  # fmt: skip
    with patch.object(rows, "dist", nobody):
        yield


class _Message(NamedTuple):
    """Holds its tensor as long as those that travel do."""

    way: None
    tensor: torch.Tensor
    neighbour: int
    group: None

    def wait(self) -> None:
        """It is there."""


def peak_of(
    vae: nn.Module, case: Case, ranks: int, rank: int, dtype: torch.dtype = torch.bfloat16, group: Any = None
) -> int:
    """Bytes beside the weights of one rank's part, on the VAE's device."""
    weights = [*vae.parameters(), *vae.buffers()]
    device = weights[0].device
    live = LiveBytes(weights) if device.type != "cuda" else None
    with torch.inference_mode(), _large_chunks(), live or contextlib.nullcontext():
        for _ in range(1 if live else 2):  # the first call chooses kernels
            x = torch.zeros(case.shape, dtype=dtype, device=device)
            if live is None:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated() - x.nbytes
            run_half(vae, case.half, x, unit=case.unit, ranks=ranks, rank=rank, group=group, tried=True)
    return live.peak if live else torch.cuda.max_memory_allocated() - before


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3], help="without torchrun; 1 comes first")
    parser.add_argument("--only", default="", help="cases whose name has this")
    options = parser.parse_args()
    together = int(os.environ.get("WORLD_SIZE", "1"))
    gpu = torch.cuda.is_available()
    if together > 1 and not gpu:
        parser.error("Ranks that exchange need GPUs.")
    use_comfyui(str(options.comfyui), {"cpu": not gpu})
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", rank) if gpu else torch.device("meta")
    if gpu:
        torch.cuda.set_device(device)
    if together > 1:
        dist.init_process_group("nccl", device_id=device)
    vaes: dict[str, nn.Module] = {}
    for name, case in CASES.items():
        if options.only not in name:
            continue
        vae = vaes.setdefault(case.vae, make_vae(case.vae, device))
        if together > 1:
            with lone():
                alone = peak_of(vae, case, 1, 0)
            _tell(name, together, _all(peak_of(vae, case, together, rank, group=dist.group.WORLD), device), alone)
            continue
        with lone():
            alone = peak_of(vae, case, 1, 0)
            for ranks in options.ranks:
                _tell(name, ranks, [peak_of(vae, case, ranks, each) for each in range(ranks)], alone)
    if together > 1:
        dist.destroy_process_group()


def _all(peak: int, device: torch.device) -> list[int]:
    """Of every rank."""
    peaks = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=device)
    peaks[dist.get_rank()] = peak
    dist.all_reduce(peaks)
    return [int(each) for each in peaks.tolist()]


def _tell(name: str, ranks: int, peaks: list[int], alone: int) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        told = ", ".join(f"{peak / 2**30:.2f}" for peak in peaks)
        print(f"{name}, {ranks}: {told} GiB; at most {max(peaks) / alone:.3f} of one's", flush=True)


if __name__ == "__main__":
    main()
