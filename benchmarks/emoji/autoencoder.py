"""The smallest autoencoder that ComfyUI's Load VAE opens: TAESD's layout, with FLUX's sixteen channels of latent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

CHANNELS = 16
"""Of a latent, whose side is an eighth of the picture's."""
SCALE, SHIFT = 0.3611, 0.1159
"""Of ComfyUI's latents for FLUX: its models compute with (latent - SHIFT) * SCALE."""
_WIDTH = 64
_CROP = 64
"""Pixels of the squares that are learned: more of them in the same time."""


class _Clamp(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x / 3) * 3


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(_conv(), nn.ReLU(), _conv(), nn.ReLU(), _conv())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.conv(x) + x)


def _conv(inside: int = _WIDTH, outside: int = _WIDTH, stride: int = 1, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(inside, outside, 3, stride, 1, bias=bias)


def _encoder() -> nn.Sequential:
    layers: list[nn.Module] = [_conv(3), _Block()]
    for _ in range(3):
        layers += [_conv(stride=2, bias=False), _Block(), _Block(), _Block()]
    return nn.Sequential(*layers, _conv(outside=CHANNELS))


def _decoder() -> nn.Sequential:
    layers: list[nn.Module] = [_Clamp(), _conv(CHANNELS), nn.ReLU()]
    for _ in range(3):
        layers += [_Block(), _Block(), _Block(), nn.Upsample(scale_factor=2), _conv(bias=False)]
    return nn.Sequential(*layers, _Block(), _conv(outside=3))


class Autoencoder(nn.Module):
    """`encode` pictures in 0 to 1 to what a FLUX computes with, near a normal distribution, and `decode` that."""

    def __init__(self) -> None:
        super().__init__()
        self.taesd_encoder, self.taesd_decoder = _encoder(), _decoder()

    def encode(self, pictures: torch.Tensor) -> torch.Tensor:
        """(B, 3, H, W) -> (B, CHANNELS, H / 8, W / 8)."""
        return self.taesd_encoder(pictures)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """The way back."""
        return self.taesd_decoder(latents)

    @classmethod
    def read(cls, path: Path) -> Autoencoder:
        """What `published` gives, from a file: it decodes, and has nothing to encode with."""
        model = cls()
        decoder = model.taesd_decoder
        state = {name.removeprefix("taesd_decoder."): tensor.float() for name, tensor in load_file(path).items()}
        decoder.load_state_dict({name: state[name] for name in decoder.state_dict()})
        return model

    def published(self) -> dict[str, torch.Tensor]:
        """What the file holds: the decoder alone, which is half of all, in bfloat16, and ComfyUI's scale of latents."""
        state = {f"taesd_decoder.{name}": tensor for name, tensor in self.taesd_decoder.state_dict().items()}
        state |= {"vae_scale": torch.tensor(SCALE), "vae_shift": torch.tensor(SHIFT)}
        return {name: tensor.detach().bfloat16().cpu().contiguous() for name, tensor in state.items()}


def train(pictures: torch.Tensor, done_part: Iterator[float], batch: int) -> Autoencoder:
    """Learn to give squares of pictures back from latents with some noise.

    Args:
        pictures: (N, 3, H, W) in 0 to 1, on the device that trains.
        done_part: how far the training is after each step, from 0 to 1; it ends with the last one.
    """
    model = Autoencoder().to(pictures.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimiser = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0, fused=pictures.is_cuda)
    for done in done_part:
        for group in optimiser.param_groups:
            group["lr"] = 1e-3 * min(1.0, 20 * done + 0.02) * (1 - done) + 1e-6
        chosen = _square(pictures[torch.randint(len(pictures), (batch,), device=pictures.device)])
        with torch.autocast(pictures.device.type, torch.bfloat16):
            latents = model.encode(chosen)
            noisy = latents + 0.1 * torch.randn_like(latents)
            back = model.decode(noisy).float()
        error = (back - chosen).abs().mean() + 0.5 * _edges(back, chosen)
        mean, spread = latents.float().mean((0, 2, 3)), latents.float().std((0, 2, 3))
        loss = error + 0.01 * (mean.square().mean() + (spread - 1).square().mean())
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
    return model


def _square(pictures: torch.Tensor) -> torch.Tensor:
    """A square of each at the same place, as often mirrored as not."""
    top, left = (int(torch.randint(side - _CROP + 1, ())) for side in pictures.shape[2:])
    square = pictures[:, :, top : top + _CROP, left : left + _CROP]
    mirrored = bool(torch.randint(2, ()))
    return (square.flip(3) if mirrored else square).contiguous(memory_format=torch.channels_last)


def _edges(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """How far differences between neighbouring pixels are apart: sharp edges."""
    difference = one - other
    return difference.diff(dim=2).abs().mean() + difference.diff(dim=3).abs().mean()
