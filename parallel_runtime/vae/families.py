"""ComfyUI's encoders and decoders whose pictures ranks can share out: the halves of a VAE, by class.

Rows meet in convolutions, paddings and group norms of a class alone, and in attention of one head that asks its module
for `optimized_attention` or `optimized_vae_attention` with (B, C, rows, columns).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ..switches import is_on


@dataclass(frozen=True)
class Half:
    """What is known of an encoder or a decoder."""

    noise: bool = False  # it adds noise to what it decodes
    chunks: str = ""  # a function of its class's module that says how many bytes may be computed at once
    limits: tuple[str, ...] = ()  # numbers of its modules, and of its class's: of what is larger it computes parts
    recorded: bool = False  # its CUDA graph was seen to compute the same, by tests on GPUs


HALVES = {
    f"comfy.ldm.{module}:{kind}{suffix}": half
    for module, suffix, half in (
        ("modules.diffusionmodules.model", "", Half(recorded=True)),
        ("wan.vae", "3d", Half(recorded=True)),
        ("wan.vae2_2", "3d", Half()),
        ("hunyuan_video.vae", "", Half()),
        ("hunyuan_video.vae_refiner", "", Half()),
        ("lightricks.vae.causal_video_autoencoder", "", Half(noise=True, chunks="get_max_chunk_size")),
        ("cosmos.cosmos_tokenizer.layers3d", "Factorized", Half()),
        ("genmo.vae.model", "", Half()),
        ("seedvr.vae", "3D", Half(limits=("memory_limit", "_NORM_LIMIT"))),
    )
    for kind in ("Encoder", "Decoder")
}


@dataclass(frozen=True)
class Tiles:
    """What is known of a half that cuts a picture into tiles by itself.

    Args:
        whole: its VAE's method that computes a picture or some frames, a tile after the other by rows of tiles.
        one: the method that computes one.
        together: tiles that are computed at once, where they fill a GPU better.
        blocks: modules of the half that are alike, and are compiled.
    """

    whole: str
    one: str
    together: int = 1
    blocks: str = ""


TILED = {
    # A tile has 1,797 tokens: a decode of 73 frames, 768 × 448, on an H200 takes 633 ms, four at once 604, eight 597.
    ("comfy.ldm.minimax.vae:MiniMaxH3VideoVAE", "decoder"): Tiles(
        "tiled_decode", "_decode_pixels", together=4, blocks="transformer_blocks"
    ),
    ("comfy.ldm.minimax.vae:MiniMaxH3VideoVAE", "encoder"): Tiles("tiled_encode", "_encode_moments"),
}


def find_tiles(vae: nn.Module, name: str) -> Tiles | None:
    """What is known of the tiles of a VAE's `encoder` or `decoder`; None of one that does not cut pictures."""
    tiles = TILED.get((f"{type(vae).__module__}:{type(vae).__name__}", name))
    return tiles if tiles and hasattr(vae, tiles.whole) and hasattr(vae, tiles.one) else None


def find_half(vae: nn.Module, name: str) -> Half | None:
    """What is known of a VAE's `encoder` or `decoder`; None of one that only a single rank can run."""
    part = getattr(vae, name, None)
    return HALVES.get(f"{type(part).__module__}:{type(part).__name__}")


def can_be_recorded(vae: nn.Module, name: str, device: torch.device) -> bool:
    """Whether a half is one whose CUDA graph was seen to compute the same, on a GPU."""
    half = find_half(vae, name)
    return name == "decoder" and half is not None and half.recorded and device.type == "cuda" and is_on("recordings")
