"""The FLUX transformers on which benchmarks/pipefusion_quality.py looks at PipeFusion's pictures.

Random weights say how far stale keys and values move a result; a small model that has learned to draw says what that
does to a picture. `open_real` takes published weights where they are there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel
from safetensors.torch import load_file

from parallel_runtime.loading.checkpoint import open_checkpoint

from .emoji.autoencoder import CHANNELS, Autoencoder
from .emoji.glyphs import SIZE, names
from .emoji.words import Words, embed
from .load_transformer import load_transformer

_CONFIG: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 64,
    "out_channels": 64,
    "attention_head_dim": 64,
    "axes_dims_rope": (8, 28, 28),
}
_RANDOM = {"num_layers": 3, "num_single_layers": 6, "num_attention_heads": 4, "joint_attention_dim": 256}


@dataclass(frozen=True)
class Subject:
    """A model and the pictures that are to be made with it.

    Args:
        x: noise, (pictures, 16, height / 8, width / 8), float32.
        text: `context`, `y` and `guidance` of the transformer's call.
        decode: latent -> (pictures, 3, height, width).
        shift: of the sigmas that it was trained with; FLUX.1-dev's at 1024 by default.
    """

    title: str
    transformer: torch.nn.Module
    dtype: torch.dtype
    x: torch.Tensor
    text: dict[str, torch.Tensor]
    decode: Callable[[torch.Tensor], torch.Tensor]
    shift: float = 3.16


def make_random(seed: int, side: int) -> Subject:
    """Every matrix keeps the scale of its input, so attention logits are about normal; the VAE's weights too."""
    generator = torch.Generator().manual_seed(seed)
    config = {**_CONFIG, **_RANDOM, "pooled_projection_dim": 64, "guidance_embeds": True}
    transformer: Any = FluxTransformer2DModel(**config)
    _fill(transformer, generator)
    vae = _random_vae(generator)
    text = {
        "context": torch.randn(1, 64, 256, generator=generator),
        "y": torch.randn(1, 64, generator=generator),
        "guidance": torch.tensor([3.5]),
    }
    x = torch.randn(1, 16, side, side, generator=generator)
    return Subject(f"random weights, seed {seed}", transformer, torch.float32, x, text, lambda z: vae.decode(z).sample)


def _fill(module: torch.nn.Module, generator: torch.Generator) -> None:
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.data = noise / math.sqrt(parameter[0].numel())
        else:
            parameter.data = 0.02 * noise + float("norm" in name and name.endswith("weight"))
    module.requires_grad_(False).eval()


def _random_vae(generator: torch.Generator) -> Any:
    widths = (16, 16, 32, 32)
    vae: Any = AutoencoderKL(
        latent_channels=16,
        block_out_channels=widths,
        down_block_types=("DownEncoderBlock2D",) * len(widths),
        up_block_types=("UpDecoderBlock2D",) * len(widths),
        norm_num_groups=8,
    )
    _fill(vae, generator)
    return vae


def open_emoji(folder: Path, count: int) -> Subject:
    """The model that has learned to draw emoji (benchmarks/emoji), with prompts from its whole vocabulary."""
    transformer: Any = FluxTransformer2DModel.from_pretrained(folder / "emoji-flux", torch_dtype=torch.float32)
    transformer.requires_grad_(False).eval()
    words, vae = Words.read(folder / "emoji-words.safetensors"), Autoencoder.read(folder / "emoji-vae.safetensors")
    named = list(names().values())
    chosen = [named[place * len(named) // count] for place in range(count)]
    context, pooled = embed(torch.stack([words.rows(each) for each in chosen]), words.table)
    x = torch.randn(count, CHANNELS, SIZE // 8, SIZE // 8, generator=torch.Generator().manual_seed(5))

    def decode(latent: torch.Tensor) -> torch.Tensor:
        return vae.decode(latent).clamp(0, 1) * 2 - 1

    title = f"learned to draw emoji, {count} prompts"
    return Subject(title, transformer, torch.float32, x, {"context": context, "y": pooled}, decode, shift=1.0)


def open_real(checkpoint: Path, prompt: Path, vae: Path | None, side: int, device: str, dtype: torch.dtype) -> Subject:
    """A published FLUX.1 file with the text embeddings of a prompt.

    Args:
        prompt: safetensors file of `context` (1, T, 4096), `y` (1, 768) and, for dev, `guidance` (1,).
        vae: diffusers folder; without one the decoded picture is that of random weights.

    Raises:
        CheckpointError, UnsupportedModelError: see `open_checkpoint`.
    """
    transformer = load_transformer(open_checkpoint(checkpoint), dtype, torch.device(device))
    text = {name: tensor.to(device) for name, tensor in load_file(prompt).items()}
    text |= {name: text[name].to(dtype) for name in ("context", "y")}
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 16, side, side, generator=generator).to(device)
    if vae is None:
        random = _random_vae(generator).to(device)
        return Subject(checkpoint.stem, transformer, dtype, x, text, lambda z: random.decode(z).sample)
    decoder: Any = AutoencoderKL.from_pretrained(vae, local_files_only=True).to(device)

    def decode(latent: torch.Tensor) -> torch.Tensor:
        z = latent / decoder.config.scaling_factor + decoder.config.shift_factor
        return decoder.decode(z).sample.clamp(-1, 1)

    return Subject(checkpoint.stem, transformer, dtype, x, text, decode)
