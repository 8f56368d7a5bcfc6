"""VAEs that cut a picture into tiles by themselves: each rank computes some of them, and all put them together."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..replaced import replaced


@dataclass(frozen=True)
class Tiled:
    """What is known of one half of such a VAE: the names of its methods.

    Args:
        whole: computes a picture or some frames, a tile after the other, by rows of tiles.
        tile: computes one.
        latent: what is cut is a latent.
    """

    whole: str
    tile: str
    latent: bool


_TILED = {
    ("comfy.ldm.minimax.vae:MiniMaxH3VideoVAE", "decoder"): Tiled("tiled_decode", "_decode_pixels", True),
    ("comfy.ldm.minimax.vae:MiniMaxH3VideoVAE", "encoder"): Tiled("tiled_encode", "_encode_moments", False),
}


def find_tiled(vae: nn.Module, name: str) -> Tiled | None:
    """What is known of a VAE's `encoder` or `decoder`; None of one that does not cut pictures."""
    tiled = _TILED.get((f"{type(vae).__module__}:{type(vae).__name__}", name))
    return tiled if tiled and hasattr(vae, tiled.whole) and hasattr(vae, tiled.tile) else None


def cut(vae: Any, tiled: Tiled, x: torch.Tensor) -> list[torch.Tensor]:
    """The tiles of (B, C, T, rows, columns), in the order in which the VAE computes them: views of one shape."""
    ratio = vae.vae_ratio if tiled.latent else 1

    def ranges(length: int) -> list[slice]:
        starts, lengths, _ = vae.split_tiles(length * ratio)
        return [slice(start // ratio, (start + size) // ratio) for start, size in zip(starts, lengths, strict=True)]

    return [x[..., rows, columns] for rows, columns in itertools.product(*map(ranges, x.shape[-2:]))]


@contextlib.contextmanager
def shared_tiles(
    vae: Any,
    tiled: Tiled,
    ranks: int,
    rank: int,
    group: dist.ProcessGroup | None,
    vote: Callable[[], None],
    now_and_then: Callable[[], None],
) -> Iterator[None]:
    """Inside, these ranks compute as many tiles each, and every one gets all: what the VAE does with them is theirs.

    Args:
        vote: before each exchange; raises where another rank failed, and would not come to it.
        now_and_then: called by all ranks at the same places.
    """
    whole, compute = getattr(vae, tiled.whole), getattr(vae, tiled.tile)

    def run(x: torch.Tensor) -> torch.Tensor:
        tiles = cut(vae, tiled, x)
        own = []
        for turn in range(0, len(tiles), ranks):
            own.append(compute(tiles[min(turn + rank, len(tiles) - 1)]))  # the last again: ranks have as many
            now_and_then()
        mine = torch.stack(own)
        of_all = mine.new_empty((ranks, *mine.shape))
        sent, received = (each.view(torch.uint8).flatten() for each in (mine, of_all))  # gloo does not know all types
        vote()
        dist.all_gather_into_tensor(received, sent, group=group)
        places = itertools.count()

        def computed(tile: torch.Tensor) -> torch.Tensor:
            place = next(places)
            if tile.shape != tiles[place].shape or tile.storage_offset() != tiles[place].storage_offset():
                raise NotImplementedError(f"{type(vae).__name__} cuts tiles in another order")
            return of_all[place % ranks, place // ranks]

        with replaced(vae, tiled.tile, computed):
            return whole(x)

    with replaced(vae, tiled.whole, run):
        yield
