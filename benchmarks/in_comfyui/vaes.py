"""The VAEs that are measured, and what they decode."""

from __future__ import annotations

from typing import NamedTuple

from .families import ENDING


class Vae(NamedTuple):
    """One VAE.

    Args:
        latent: shape of what is decoded; small: with --cpu.
    """

    described: str
    latent: tuple[int, ...]
    small: tuple[int, ...]


VAES = {
    "flux": Vae("FLUX 1024 × 1024", (1, 16, 128, 128), (1, 16, 4, 4)),
    "wan": Vae("Wan 2.1 832 × 480, 81 frames", (1, 16, 21, 60, 104), (1, 16, 1, 4, 4)),
}


def vae_file(name: str) -> str:
    """Name of a VAE's file, which vae_files.py writes."""
    return f"benchmark-{name}{ENDING}"
