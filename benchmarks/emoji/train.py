"""Train the model that the demo, the tests and the documents draw with: five minutes of one H100, from a font.

    python -m benchmarks.emoji.train --out benchmarks/emoji/model        # after: apt install fonts-noto-color-emoji

Writes emoji-flux (FLUX.1 schnell, 128 wide, one double and four single blocks, as diffusers has it),
emoji-vae.safetensors (TAESD's decoder), emoji-words.safetensors (the words as conditioning), and emoji.png (what the
model draws of every second name, beside the font's picture).
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from PIL import Image
from safetensors.torch import save_file

from . import autoencoder, glyphs
from .words import WIDTH, Words, embed

CONFIG: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 64,
    "out_channels": 64,
    "num_layers": 1,
    "num_single_layers": 4,
    "attention_head_dim": 128,
    "num_attention_heads": 1,
    "joint_attention_dim": WIDTH,
    "pooled_projection_dim": WIDTH,
    "guidance_embeds": False,
    "axes_dims_rope": (16, 56, 56),
}
DROPPED = 0.1
"""Share of pictures that are learned without their words, so that CFG has what it departs from."""
STEPS = 20
"""Of the pictures that show what was learned."""


def progress(steps: int) -> Iterator[float]:
    """From 0 to 1."""
    began = time.monotonic()
    yield from (step / steps for step in range(steps))
    print(f"{steps} steps in {time.monotonic() - began:.0f} s", flush=True)


def to_tokens(latents: torch.Tensor) -> torch.Tensor:
    """(B, C, H, W) -> (B, H / 2 * W / 2, 4 C), as FLUX cuts a latent into tokens."""
    batch, channels, height, width = latents.shape
    cut = latents.reshape(batch, channels, height // 2, 2, width // 2, 2)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(batch, height * width // 4, 4 * channels)


def to_latents(tokens: torch.Tensor, side: int) -> torch.Tensor:
    """The way back, to a square of `side`."""
    batch, _, width = tokens.shape
    cut = tokens.reshape(batch, side // 2, side // 2, width // 4, 2, 2)
    return cut.permute(0, 3, 1, 4, 2, 5).reshape(batch, width // 4, side, side)


class Velocity(torch.nn.Module):
    """diffusers' FLUX over tokens of pictures of one size.

    Args:
        side: of a latent.
        flux: the model.
    """

    def __init__(self, side: int, flux: Any) -> None:
        super().__init__()
        self.flux = flux
        rows, columns = torch.meshgrid(torch.arange(side // 2), torch.arange(side // 2), indexing="ij")
        places = torch.stack([torch.zeros_like(rows), rows, columns], -1).reshape(-1, 3).float()
        self.register_buffer("places", places, persistent=False)

    def forward(self, x: torch.Tensor, sigma: torch.Tensor, context: torch.Tensor, pooled: torch.Tensor):
        """Noise minus picture, (B, N, 64), at (B,) `sigma` from 0 to 1."""
        text = x.new_zeros(context.shape[1], 3)
        return self.flux(x, context, pooled, sigma, self.places, text, return_dict=False)[0]


def train(latents: torch.Tensor, rows: torch.Tensor, words: int, done_part: Iterator[float], batch: int):
    """Learn the way from noise to latents (flow matching), with the words' table.

    Without torch.compile and without bfloat16: on an H100 with torch 2.11 either ended in a fault of the GPU's memory.

    Args:
        latents: (N, C, H, W), on the device that trains.
        rows: (N, LENGTH): each one's words.
        words: how many there are.
        done_part: how far the training is after each step, from 0 to 1; it ends with the last one.

    Returns:
        The mean of the last models, as `Velocity`, and the table (V, WIDTH).
    """
    device, tokens = latents.device, to_tokens(latents)
    model = Velocity(latents.shape[-1], FluxTransformer2DModel(**CONFIG)).to(device)
    table = torch.nn.Parameter(torch.randn(words, WIDTH, device=device))
    kept, kept_table = copy.deepcopy(model), table.detach().clone()
    parameters = [*model.parameters(), table]
    means = [*kept.parameters(), kept_table]
    for mean in means:
        mean.requires_grad_(False)
    optimiser = torch.optim.AdamW(parameters, 1.5e-3, betas=(0.9, 0.99), weight_decay=0.0, fused=latents.is_cuda)
    for done in done_part:
        for group in optimiser.param_groups:
            group["lr"] = 1.5e-3 * min(1.0, 50 * done + 0.01) * (0.5 + 0.5 * math.cos(math.pi * done)) + 1e-6
        chosen = torch.randint(len(tokens), (batch,), device=device)
        sigma = torch.randn(batch, device=device).sigmoid()
        noise, target = torch.randn_like(tokens[chosen]), tokens[chosen]
        asked = torch.where(torch.rand(batch, 1, device=device) < DROPPED, -1, rows[chosen])
        context, pooled = embed(asked, table)
        mixed = sigma[:, None, None] * noise + (1 - sigma[:, None, None]) * target
        loss = (model(mixed, sigma, context, pooled) - (noise - target)).square().mean()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        torch._foreach_lerp_(means, [parameter.detach() for parameter in parameters], 2e-3 + 0.2 * (1 - done) ** 8)
    print(f"Last loss {loss.item():.4f}", flush=True)
    return kept, kept_table


@torch.no_grad()
def sample(model: Velocity, noise: torch.Tensor, context: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
    """Latents by Euler's method from noise (B, C, side, side)."""
    x = to_tokens(noise)
    sigmas = torch.linspace(1, 0, STEPS + 1, device=context.device)
    for sigma, following in itertools.pairwise(sigmas):
        x = x + (following - sigma) * model(x, sigma.expand(len(x)), context, pooled)
    return to_latents(x, noise.shape[-1])


def sheet(pictures: torch.Tensor, columns: int = 20) -> Image.Image:
    """(N, 3, H, W) in 0 to 1, in rows."""
    missing = -len(pictures) % columns
    filled = torch.cat([pictures, pictures.new_ones(missing, *pictures.shape[1:])]).clamp(0, 1)
    _, channels, height, width = filled.shape
    grid = filled.reshape(-1, columns, channels, height, width).permute(0, 3, 1, 4, 2)
    return Image.fromarray((grid.reshape(-1, columns * width, channels) * 255).byte().cpu().numpy())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--font", type=Path, default=glyphs.FONT)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--autoencoder-steps", type=int, default=4050)
    parser.add_argument("--steps", type=int, default=7900)
    parser.add_argument("--batch", type=int, default=512)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options.out.mkdir(parents=True, exist_ok=True)

    named = glyphs.names()
    pictures = glyphs.draw(list(named), options.font).to(device).float() / 255
    vocabulary = sorted({word for words in named.values() for word in words})
    print(f"{len(named)} pictures, {len(vocabulary)} words", flush=True)
    coder = autoencoder.train(pictures, progress(options.autoencoder_steps), options.batch // 8)
    save_file(coder.published(), options.out / "emoji-vae.safetensors")
    coder.load_state_dict({name: tensor.bfloat16().float() for name, tensor in coder.state_dict().items()})
    with torch.no_grad():
        latents = torch.cat([coder.encode(part) for part in pictures.split(64)])
        back = torch.cat([coder.decode(part) for part in latents.split(64)])
    print(f"Latents: mean {latents.mean():.3f}, spread {latents.std():.3f}. Back: {_psnr(back, pictures)}", flush=True)

    rows = torch.stack([Words(vocabulary, torch.empty(0)).rows(words) for words in named.values()]).to(device)
    model, table = train(latents, rows, len(vocabulary), progress(options.steps), options.batch)
    Words(vocabulary, table).save(options.out / "emoji-words.safetensors")
    model.flux.bfloat16().save_pretrained(options.out / "emoji-flux")
    model.flux.float()
    context, pooled = embed(rows, table.bfloat16().float())
    with torch.no_grad():
        noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(0)).to(device)
        drawn = coder.decode(sample(model, noise, context, pooled))
    print(f"Drawn from noise: {_psnr(drawn, pictures)}", flush=True)
    sheet(torch.stack([pictures[::2], drawn[::2]], 1).flatten(0, 1)).save(options.out / "emoji.png")


def _psnr(ours: torch.Tensor, theirs: torch.Tensor) -> str:
    errors = (ours.clamp(0, 1) - theirs).square().mean((1, 2, 3))
    decibels = -10 * errors.log10()
    return f"{decibels.mean():.1f} dB in the mean, {decibels.min():.1f} at worst"


if __name__ == "__main__":
    main()
