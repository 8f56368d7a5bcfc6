"""Milliseconds of MiniMax H3's decoder alone, 73 frames of 768 × 448: as ComfyUI runs it, four tiles at once, compiled.

    python -m benchmarks.tiled_decoder --comfyui ~/ComfyUI [--int8] [--tiny]

Random weights at real size in fp16, or as the official templates load them; the distance is from ComfyUI's, over its
norm. `--tiny` tries the command on a CPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from parallel_runtime.networks.comfyui.comfy_code import use_comfyui
from parallel_runtime.vae.compiled_decoder import CompiledDecoder
from parallel_runtime.vae.shared_vae import run_half
from tests.comfyui_vaes.tiny import fill, h3, h3_in_int8

from .in_comfyui.vae_files import h3 as real_h3
from .in_comfyui.vae_files import in_int8
from .in_comfyui.vaes import VAES
from .kernel_times import milliseconds


def make(int8: bool, tiny: bool, device: torch.device, dtype: torch.dtype) -> Any:
    """The VAE."""
    import comfy.ops
    from comfy.ldm.minimax.vae import MiniMaxH3VideoVAE

    if tiny:
        return h3_in_int8(fill(h3())) if int8 else fill(h3())
    with device:
        vae = fill(real_h3().to(dtype))
        if int8:
            weights = in_int8(vae.state_dict())
            vae = MiniMaxH3VideoVAE(operations=comfy.ops.mixed_precision_ops({"mixed_ops": True}, dtype)).to(dtype)
            vae.load_state_dict({name: weight.cpu() for name, weight in weights.items()})
    return vae.eval().requires_grad_(False).to(device)


@torch.inference_mode()
def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--int8", action="store_true", help="as the official templates load it")
    parser.add_argument("--tiny", action="store_true", help="a small one, on a CPU")
    options = parser.parse_args()
    use_comfyui(str(options.comfyui.expanduser()), {"cpu": options.tiny})
    device, dtype = (torch.device("cpu"), torch.float32) if options.tiny else (torch.device("cuda"), torch.float16)
    vae = make(options.int8, options.tiny, device, dtype)
    z = torch.randn((1, 24, 7, 7, 5) if options.tiny else VAES["h3"].latent, device=device, dtype=dtype)
    compiled, expected = CompiledDecoder(), None
    ours = partial(run_half, vae, "decoder", unit=1, ranks=1, rank=0, group=None, tried=True)
    ways: dict[str, Callable[[], Any]] = {
        "ComfyUI's": lambda: vae.decode(z, z.new_empty(vae.decode_output_shape(z.shape), dtype=torch.float32)),
        "tiles together": lambda: ours(z.clone()),
        "and compiled": lambda: ours(z.clone(), compiled=lambda: compiled),
    }
    for name, call in ways.items():
        started = time.perf_counter()
        made = call()
        first = time.perf_counter() - started
        expected = made if expected is None else expected
        apart = float((made - expected).norm() / expected.norm())
        print(f"{name:15} {milliseconds(call, 5):8.0f} ms, first {first:.1f} s, distance {apart:.1e}", flush=True)
    if compiled.methods.refused:
        print("not compiled:", *compiled.methods.refused.values())


if __name__ == "__main__":
    main()
