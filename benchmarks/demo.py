"""`make demo`: the whole path without a GPU and without ComfyUI, on a FLUX of a few million random weights.

Starts a pool of two CPU ranks, samples one picture with one rank and with both, compares them, writes the picture.
The weights are random, so the picture is an abstract one; that both are the same one is the point.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from PIL import Image

from parallel_runtime.config import ParallelConfig
from tests.tiny_flux import tiny_config, write_diffusers_folder
from workers.client.client import Branch, LoopRequest, ModelRequest
from workers.client.pool_registry import close_pools, get_pool

STEPS = 6


def make_request(size: int) -> LoopRequest:
    """A prompt made of random numbers, for a picture of size x size pixels."""
    generator = torch.Generator().manual_seed(7)
    conditioning = {
        "context": torch.randn(1, 64, 64, generator=generator),
        "y": torch.randn(1, 32, generator=generator),
        "guidance": torch.tensor([3.5]),
    }
    x = torch.randn(1, 16, size // 8, size // 8, generator=generator)
    return LoopRequest("euler", torch.linspace(1, 0, STEPS + 1), x, (Branch(conditioning, 0),), 1.0, 7)


def to_image(latent: torch.Tensor) -> Image.Image:
    """Three fixed mixes of the sixteen latent channels as red, green and blue; a VAE would need real weights."""
    mix = torch.randn(3, latent.shape[1], generator=torch.Generator().manual_seed(3))
    colours = torch.einsum("rc,chw->hwr", mix, latent[0])
    colours = (colours - colours.amin((0, 1))) / (colours.amax((0, 1)) - colours.amin((0, 1)))
    picture = Image.fromarray((colours * 255).byte().numpy())
    return picture.resize((picture.width * 8, picture.height * 8), Image.Resampling.BICUBIC)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--out", type=Path, default=Path("demo-output"))
    arguments = parser.parse_args()
    request = make_request(arguments.size)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = write_diffusers_folder(Path(folder) / "tiny-flux", tiny_config(num_layers=3, num_single_layers=6))
        print("Starting a pool of two CPU ranks ...", flush=True)
        get_pool(ParallelConfig(devices="cpu:2")).start()
        for ranks in (1, 2):
            config = ParallelConfig(devices=f"cpu:{ranks}")
            model = ModelRequest(str(path), "float32", config)
            pool = get_pool(config)  # one rank is a part of the same pool: nothing is started anew
            plan = pool.load(model).explanation
            pool.sample(model, request)
            started = time.perf_counter()
            latent = pool.sample(model, request)
            rows.append((ranks, plan, (time.perf_counter() - started) / STEPS, latent))
        close_pools()
    print(f"\nFLUX with random weights, {arguments.size} x {arguments.size}, euler, {STEPS} steps\n")
    print(f"{'ranks':>5}  {'seconds per step':>16}  {'max difference':>14}  plan")
    for ranks, plan, seconds, latent in rows:
        print(f"{ranks:>5}  {seconds:>16.3f}  {(latent - rows[0][3]).abs().max().item():>14.1e}  {plan}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    to_image(rows[-1][3]).save(arguments.out / "two-ranks.png")
    print(f"\nWrote {arguments.out / 'two-ranks.png'}")


if __name__ == "__main__":
    main()
