"""The FLUX transformers on which benchmarks/pipefusion_quality.py looks at PipeFusion's pictures.

Random weights say how far stale keys and values move a result; a model that has learned to draw says what that does to
a picture. No published weights are needed: the second one learns to draw a disc in front of a colour gradient while
you wait. `open_real` takes published weights where they are there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, FluxTransformer2DModel
from safetensors.torch import load_file

from parallel_runtime.loading.checkpoint import open_checkpoint
from parallel_runtime.networks.diffusers.flux import FLUX

from .load_transformer import load_transformer

_CONFIG: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 64,
    "out_channels": 64,
    "attention_head_dim": 64,
    "axes_dims_rope": (8, 28, 28),
}
_RANDOM = {"num_layers": 3, "num_single_layers": 6, "num_attention_heads": 4, "joint_attention_dim": 256}
_DRAWING = {"num_layers": 2, "num_single_layers": 4, "num_attention_heads": 2, "joint_attention_dim": 32}
_WORDS = 8


@dataclass(frozen=True)
class Subject:
    """A model and the pictures that are to be made with it.

    Args:
        x: noise, (pictures, 16, height / 8, width / 8), float32.
        text: `context`, `y` and `guidance` of the transformer's call.
        decode: latent -> (pictures, 3, height, width).
    """

    title: str
    transformer: torch.nn.Module
    dtype: torch.dtype
    x: torch.Tensor
    text: dict[str, torch.Tensor]
    decode: Callable[[torch.Tensor], torch.Tensor]


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


class Drawings:
    """Latents of a disc in front of a gradient, and texts that say the disc's colour and nothing else.

    Where the disc will be is decided during sampling, in the first steps, by all tokens together.
    """

    def __init__(self, side: int):
        self._generator = torch.Generator().manual_seed(1)
        self.side = side
        self.colours = torch.linalg.qr(torch.randn(16, 16, generator=self._generator))[0][:, :3] * 2.3
        self._words = torch.randn(_WORDS * 32, 3, generator=self._generator)
        self._pooled = torch.randn(16, 3, generator=self._generator)

    def draw(self, count: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Latents (count, 16, side, side), and their texts."""
        angle = self._uniform(count) * 2 * math.pi
        places = torch.linspace(0, 1, self.side)
        y, x = torch.meshgrid(places, places, indexing="ij")
        ramp = (torch.cos(angle) * (x - 0.5) + torch.sin(angle) * (y - 0.5) + 0.5).clamp(0, 1)
        first, second, colour = (self._uniform(count, 3) * 2 - 1 for _ in range(3))
        radius, left, top = 0.12 + 0.2 * self._uniform(count), *(0.2 + 0.6 * self._uniform(count) for _ in "xy")
        distance = ((x - left) ** 2 + (y - top) ** 2).sqrt()
        disc = torch.sigmoid((radius - distance) * 60)
        picture = (first * (1 - ramp) + second * ramp) * (1 - disc) + colour * disc
        return torch.einsum("kc,bchw->bkhw", self.colours, picture), self.text(colour.flatten(1))

    def text(self, colour: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the transformer is told of colours (count, 3)."""
        words = (colour @ self._words.T).reshape(len(colour), _WORDS, -1)
        return {"context": words, "y": colour @ self._pooled.T}

    def decode(self, latent: torch.Tensor) -> torch.Tensor:
        """The picture of a latent, 8 pixels to one of its own: colours exactly, between them smoothly."""
        picture = torch.einsum("kc,bkhw->bchw", self.colours / self.colours.square().sum(0), latent)
        return F.interpolate(picture, scale_factor=8, mode="bilinear").clamp(-1, 1)

    def _uniform(self, count: int, channels: int = 1) -> torch.Tensor:
        return torch.rand(count, channels, 1, 1, generator=self._generator)


def learn_to_draw(side: int, iterations: int) -> Subject:
    """Fit a rectified flow (Liu et al. 2022) to `Drawings`; about 0.3 s per iteration on one core at side 24."""
    torch.manual_seed(0)
    drawings = Drawings(side)
    config = {**_CONFIG, **_DRAWING, "pooled_projection_dim": 16, "guidance_embeds": False}
    transformer: Any = FluxTransformer2DModel(**config)
    for name, parameter in transformer.named_parameters():
        if name.startswith("proj_out") or ".linear." in name:  # modulations: blocks begin as the identity
            parameter.data.zero_()
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, iterations, pct_start=0.05)
    for _ in range(iterations):
        latent, text = drawings.draw(16)
        noise = torch.randn_like(latent)
        sigma = torch.sigmoid(torch.randn(len(latent)) * 1.2 + 0.5)
        mixed = torch.lerp(latent, noise, sigma.view(-1, 1, 1, 1))
        arguments = FLUX.adapter.to_transformer(mixed, sigma, config=transformer.config, **text)
        velocity = FLUX.adapter.from_transformer(transformer(**arguments, return_dict=False)[0], mixed)
        F.mse_loss(velocity, noise - latent).backward()
        torch.nn.utils.clip_grad_norm_(transformer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
    transformer.requires_grad_(False).eval()
    x = torch.randn(4, 16, side, side, generator=torch.Generator().manual_seed(5))
    text = drawings.text(torch.tensor([[0.9, 0.3, -0.8], [-0.9, 0.8, 0.2], [0.1, -0.9, 0.9], [0.8, 0.9, 0.9]]))
    title = f"learned to draw, {iterations} iterations"
    return Subject(title, transformer, torch.float32, x, text, drawings.decode)


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
