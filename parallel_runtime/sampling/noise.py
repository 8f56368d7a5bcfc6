"""Random numbers of a sampling run, drawn as ComfyUI would draw them for the same seed."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import RequestError
from ..said import said

MAX_SEED = 2**64 - 1


def _generator(seed: int, offset: int, device: torch.device | str) -> torch.Generator:
    if not 0 <= seed <= MAX_SEED - offset:
        raise RequestError(
            said("Seed {seed} cannot start the noise on {device}.", seed=seed, device=device),
            said("Choose one from 0 to {max_seed}.", max_seed=MAX_SEED - 1),
        )
    try:
        generator = torch.Generator(device=device)
    except RuntimeError as error:
        raise RequestError(
            said("The noise of this sampler is drawn on {device}, and the workers have no such device.", device=device),
            "Run the workers on the kind of device that ComfyUI uses, or choose a sampler that adds no noise.",
        ) from error
    return generator.manual_seed(seed + offset)


class NoiseSource:
    """Noise that a sampler adds between steps: one stream, drawn on a chosen device.

    The same seed gives other numbers on a GPU than on a CPU, so the device must be of the type on which ComfyUI's own
    sampler would run. There ComfyUI starts the stream from `seed` on a GPU, and from `seed + 1` on the CPU, because
    the start noise of the run has come from a CPU stream with `seed` already.

    Every rank draws the whole noise for itself. The CUDA stream depends on the number of multiprocessors, so GPUs of
    different models draw different numbers: among such the first rank's latent counts (denoising/denoise.py).

    Args:
        seed: of the run, 0 to 2**64 - 1 (2**64 - 2 on the CPU).
        device: where the numbers are drawn.
        scale: factor on every draw (the noise scale of ComfyUI's model sampling).

    Raises:
        RequestError: a seed out of range, or a device that is not there.
    """

    def __init__(self, seed: int, device: torch.device | str = "cpu", scale: float = 1.0):
        self.scale = scale
        self._stream = _generator(seed, 1 if str(device).startswith("cpu") else 0, device)

    def draw(self, like: torch.Tensor) -> torch.Tensor:
        """Return the next noise, with the shape, dtype and device of `like`."""
        device = self._stream.device
        # Onto a GPU out of pinned memory, without waiting: else every step of such a sampler would wait for the GPU.
        pinned = like.is_cuda and device.type == "cpu"
        drawn = torch.randn(like.shape, dtype=like.dtype, device=device, generator=self._stream, pin_memory=pinned)
        return drawn.to(like.device, non_blocking=pinned) * self.scale


class PartNoise:
    """Noise for a run over a part of a latent: each draw is its part of the draw for the whole, so that the number of
    parts does not change the noise.

    Args:
        source: of this part alone; those of all parts begin alike.
        whole: the latent that is cut; only shape, dtype and device are read.
        part: tensor index, such as `(..., slice(0, 8), slice(None))`.
    """

    def __init__(self, source: NoiseSource, whole: torch.Tensor, part: Any):
        self._source, self._whole, self._part = source, whole, part

    def draw(self, like: torch.Tensor) -> torch.Tensor:
        """Return the next noise; `like` is this part of the latent."""
        return self._source.draw(self._whole)[self._part].to(like)


Noise = NoiseSource | PartNoise
"""Where a sampler gets the noise that it adds."""
