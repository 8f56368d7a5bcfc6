"""Random matrices in Q4_K, the type that most GGUF files of diffusion models have."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

BLOCK, BLOCK_BYTES = 256, 144
"""Numbers of a Q4_K block, and its bytes: two float16, eight packed scales and minima, 128 bytes of nibbles."""
_SCALES = (160,) * 8 + (0,) * 4
"""All scales and minima 32, packed in 6 bits each."""
_OF_BLOCK = 32.0
_NIBBLES_MEAN, _NIBBLES_DEVIATION = 7.5, math.sqrt((16**2 - 1) / 12)


def q4_k(generator: torch.Generator, shape: Sequence[int], deviation: float) -> torch.Tensor:
    """A random matrix in Q4_K.

    Args:
        shape: of the matrix; its columns are whole blocks.
        deviation: of its numbers, whose mean is 0.

    Returns:
        (rows, bytes) uint8 on the generator's device.
    """
    rows, blocks = shape[0], shape[1] // BLOCK
    device = generator.device
    scale = deviation / (_OF_BLOCK * _NIBBLES_DEVIATION)
    both = torch.tensor([scale, scale * _NIBBLES_MEAN], dtype=torch.float16).view(torch.uint8)
    head = torch.cat([both, torch.tensor(_SCALES, dtype=torch.uint8)]).to(device)
    nibbles = torch.randint(256, (rows, blocks, BLOCK // 2), generator=generator, dtype=torch.uint8, device=device)
    return torch.cat([head.expand(rows, blocks, -1), nibbles], dim=2).reshape(rows, -1)
