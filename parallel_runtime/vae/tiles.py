"""VAEs that cut a picture into tiles by themselves: each rank computes some of them, and all put them together."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..replaced import replaced
from .rows import Rows

_TILED = {
    ("comfy.ldm.minimax.vae:MiniMaxH3VideoVAE", "decoder"): ("tiled_decode", "_decode_pixels"),
    ("comfy.ldm.minimax.vae:MiniMaxH3VideoVAE", "encoder"): ("tiled_encode", "_encode_moments"),
}
"""The methods of one half of such a VAE that compute a picture or some frames, a tile after the other by rows of tiles,
and that compute one."""


def find_tiled(vae: nn.Module, name: str) -> tuple[str, str] | None:
    """The methods of a VAE's `encoder` or `decoder` that know tiles; None of one that does not cut pictures."""
    methods = _TILED.get((f"{type(vae).__module__}:{type(vae).__name__}", name))
    return methods if methods and all(hasattr(vae, method) for method in methods) else None


def cut(vae: Any, name: str, x: torch.Tensor) -> list[torch.Tensor]:
    """The tiles of (B, C, T, rows, columns), in the order in which the VAE computes them: views of one shape."""
    ratio = vae.vae_ratio if name == "decoder" else 1

    def ranges(length: int) -> list[slice]:
        starts, lengths, _ = vae.split_tiles(length * ratio)
        return [slice(start // ratio, (start + size) // ratio) for start, size in zip(starts, lengths, strict=True)]

    return [x[..., rows, columns] for rows, columns in itertools.product(*map(ranges, x.shape[-2:]))]


@contextlib.contextmanager
def shared_tiles(
    vae: Any, name: str, methods: tuple[str, str], place: Rows, now_and_then: Callable[[], None]
) -> Iterator[None]:
    """Inside, ranks compute as many tiles each, and every one gets all: what the VAE does with them is its own.
    `now_and_then` is called by all ranks at the same places."""
    ranks = len(place.shares)
    whole, compute = (getattr(vae, method) for method in methods)

    def run(x: torch.Tensor) -> torch.Tensor:
        tiles = cut(vae, name, x)
        own = []
        for turn in range(0, len(tiles), ranks):
            own.append(compute(tiles[min(turn + place.rank, len(tiles) - 1)]))  # the last again: ranks have as many
            now_and_then()
        of_all, arrived = place.exchange(torch.stack(own))
        arrived()
        numbers = itertools.count()

        def computed(tile: torch.Tensor) -> torch.Tensor:
            number = next(numbers)
            if tile.shape != tiles[number].shape or tile.storage_offset() != tiles[number].storage_offset():
                raise NotImplementedError(f"{type(vae).__name__} cuts tiles in another order")
            return of_all[number % ranks, number // ranks]

        with replaced(vae, methods[1], computed):
            return whole(x)

    with replaced(vae, methods[0], run):
        yield
