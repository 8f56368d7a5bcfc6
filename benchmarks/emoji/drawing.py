"""Pictures of the model that has learned to draw emoji, in one process and without the pool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import FluxTransformer2DModel

from .autoencoder import CHANNELS, Autoencoder
from .train import Velocity, sample
from .words import Words

MODEL = Path(__file__).parent / "model"


class Artist:
    """Draws by words.

    Args:
        folder: what `train` wrote.
    """

    def __init__(self, folder: Path = MODEL):
        self._words = Words.read(folder / "emoji-words.safetensors")
        self._vae = Autoencoder.read(folder / "emoji-vae.safetensors")
        self._flux = FluxTransformer2DModel.from_pretrained(folder / "emoji-flux").float()

    @torch.no_grad()
    def draw(self, prompts: Sequence[str], seed: int = 7, side: int = 16) -> torch.Tensor:
        """Draw a picture of each prompt from the same noise.

        Args:
            side: of the latent.

        Returns:
            (N, 3, 8 side, 8 side), from 0 to 1.

        Raises:
            UnknownWordError: the model does not know a word.
        """
        texts = [self._words.conditioning(prompt) for prompt in prompts]
        context, pooled = (torch.cat(parts) for parts in zip(*texts, strict=True))
        noise = torch.randn(1, CHANNELS, side, side, generator=torch.Generator().manual_seed(seed))
        latents = sample(Velocity(side, self._flux), noise.expand(len(prompts), -1, -1, -1), context, pooled)
        return self._vae.decode(latents).clamp(0, 1)
