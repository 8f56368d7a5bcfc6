"""`make demo`: the whole path without a GPU and without ComfyUI, on a tiny FLUX that has learned to draw emoji.

Starts a pool of two CPU ranks, draws the prompt with one rank and with both, and writes both pictures side by side with
what differs between them. `PROMPT="red apple" make demo` draws another.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont

from benchmarks.emoji.autoencoder import Autoencoder
from benchmarks.emoji.words import UnknownWordError, Words
from parallel_runtime.config import ParallelConfig
from parallel_runtime.requests.requests import Sample
from workers.client.node_requests import LoopRequest, ModelRequest
from workers.client.pool_registry import get_pool

MODEL = Path(__file__).parent / "emoji" / "model"
STEPS, SIDE, SEED = 20, 16, 7
"""SIDE: of the latent, an eighth of the picture's."""
_SHOWN, _MARGIN, _CAPTION = 256, 16, 44
"""Pixels of each picture as it is shown, around it, and for the words above."""


def make_request(words: Words, prompt: str, seed: int) -> LoopRequest:
    """What a sampler sends for this prompt.

    Raises:
        UnknownWordError: the model does not know a word of it.
    """
    context, pooled = words.conditioning(prompt)
    noise = torch.randn(1, 16, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))
    sigmas = torch.linspace(1, 0, STEPS + 1)
    job = Sample("", "euler", (), cfg=1.0)
    return LoopRequest(job, {0: {"context": context, "y": pooled}}, {"x": noise, "sigmas": sigmas, "timesteps": sigmas})


def decode(latent: torch.Tensor) -> torch.Tensor:
    """(H, W, 3) uint8."""
    with torch.no_grad():
        picture = Autoencoder.read(MODEL / "emoji-vae.safetensors").decode(latent)[0]
    return (picture.clamp(0, 1) * 255).round().byte().permute(1, 2, 0)


def side_by_side(prompt: str, pictures: dict[str, torch.Tensor]) -> Image.Image:
    """Pictures (H, W, 3) with their captions, under the prompt."""
    width = _MARGIN + len(pictures) * (_SHOWN + _MARGIN)
    sheet = Image.new("RGB", (width, 2 * _CAPTION + _SHOWN + _MARGIN), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=18)
    pen.text((_MARGIN, 14), f"“{prompt}”", "black", font)
    for place, (caption, picture) in enumerate(pictures.items()):
        left = _MARGIN + place * (_SHOWN + _MARGIN)
        pen.text((left, _CAPTION + 14), caption, "#555555", font)
        shown = Image.fromarray(picture.numpy()).resize((_SHOWN, _SHOWN), Image.Resampling.LANCZOS)
        sheet.paste(shown, (left, 2 * _CAPTION))
        pen.rectangle((left, 2 * _CAPTION, left + _SHOWN - 1, 2 * _CAPTION + _SHOWN - 1), outline="#dddddd")
    return sheet


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", default=os.environ.get("PROMPT") or "red apple")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--out", type=Path, default=Path("demo-output"))
    arguments = parser.parse_args()
    try:
        words = Words.read(MODEL / "emoji-words.safetensors")
        request = make_request(words, arguments.prompt, arguments.seed)
    except UnknownWordError as error:
        sys.exit(str(error))
    latents, plans = [], []
    print("Starting a pool of two CPU ranks ...", flush=True)
    get_pool(ParallelConfig(devices="cpu:2")).start()
    for ranks in (1, 2):
        config = ParallelConfig(devices=f"cpu:{ranks}")
        model = ModelRequest(str(MODEL / "emoji-flux"), "float32", config)
        pool = get_pool(config)  # one rank is a part of the same pool: nothing is started anew
        plans.append(pool.load(model).explanation)
        started = time.perf_counter()
        latents.append(pool.sample(model, request))
        print(f"{ranks} rank(s): {STEPS} steps in {time.perf_counter() - started:.1f} s. {plans[-1]}", flush=True)
    one, two = map(decode, latents)
    apart = (one.int() - two.int()).abs()
    print(f"Largest difference of the latents: {(latents[0] - latents[1]).abs().max():.1e}.")
    print(f"Largest difference of the 8-bit pictures: {apart.max()}; pixels that differ: {apart.any(2).sum()}.")
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "one-and-two-ranks.png"
    shown = {"one rank": one, "two ranks": two, f"difference: {apart.max()}": 255 - apart.byte()}
    side_by_side(arguments.prompt, shown).save(path)
    print(f"Wrote {path}")


if __name__ == "__main__":
    main()
