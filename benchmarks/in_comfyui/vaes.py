"""What is decoded where VAEs are measured."""

from __future__ import annotations

from typing import NamedTuple

from .families import ENDING


class Vae(NamedTuple):
    """What is decoded.

    Args:
        vae: of vae_files.py.
        latent: its shape; small: with --cpu.
    """

    vae: str
    described: str
    latent: tuple[int, ...]
    small: tuple[int, ...]


VAES = {
    "flux": Vae("flux", "FLUX 1024 × 1024", (1, 16, 128, 128), (1, 16, 4, 4)),
    "flux large": Vae("flux", "FLUX 2048 × 2048", (1, 16, 256, 256), (1, 16, 6, 4)),
    "wan": Vae("wan", "Wan 2.1 832 × 480, 81 frames", (1, 16, 21, 60, 104), (1, 16, 1, 4, 4)),
    "wan large": Vae("wan", "Wan 2.1 1280 × 720, 81 frames", (1, 16, 21, 90, 160), (1, 16, 1, 6, 4)),
    "h3": Vae("h3", "MiniMax H3 int8 768 × 448, 73 frames", (1, 24, 22, 28, 48), (1, 24, 1, 2, 2)),
}


def vae_file(name: str) -> str:
    """Name of a VAE's file, which vae_files.py writes."""
    return f"benchmark-{name}{ENDING}"
