"""Pictures that a VAE cuts into tiles by itself: ranks share out the tiles, and ComfyUI's code puts them together."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from ..patching.patch_data import as_bytes
from ..replaced import replaced
from .families import Tiles
from .rows import Rows

if TYPE_CHECKING:
    from .compiled_decoder import CompiledDecoder


def cut(vae: Any, name: str, x: torch.Tensor) -> list[torch.Tensor]:
    """The tiles of (B, C, T, rows, columns), in the order in which the VAE computes them: views of one shape."""
    ratio = vae.vae_ratio if name == "decoder" else 1

    def ranges(length: int) -> list[slice]:
        starts, lengths, _ = vae.split_tiles(length * ratio)
        return [slice(start // ratio, (start + size) // ratio) for start, size in zip(starts, lengths, strict=True)]

    return [x[..., rows, columns] for rows, columns in itertools.product(*map(ranges, x.shape[-2:]))]


@contextlib.contextmanager
def shared_tiles(
    vae: Any, name: str, tiles: Tiles, place: Rows, now_and_then: Callable[[], None],
    compiled: Callable[[], CompiledDecoder] | None,
) -> Iterator[None]:  # fmt: skip
    """Inside, ranks compute as many tiles each, some at once, and get all; all call `now_and_then` at the same
    places. `compiled`: see `run_half`."""
    ranks = len(place.shares)
    whole, compute = getattr(vae, tiles.whole), getattr(vae, tiles.one)

    def run(x: torch.Tensor) -> torch.Tensor:
        parts = cut(vae, name, x)
        last = len(parts) - 1
        own = [parts[min(first + place.rank, last)] for first in range(0, len(parts), ranks)]  # as many on each rank
        made: list[torch.Tensor] = []
        turns = -(-len(own) // tiles.together)
        for turn in range(turns):  # of as many tiles each: one by itself would have a graph of its own
            some = own[len(own) * turn // turns : len(own) * (turn + 1) // turns]
            made += compute(torch.cat(some)).split(x.shape[0])
            now_and_then()
        of_all, arrived = place.exchange(torch.stack(made))
        arrived()
        numbers = iter(range(len(parts)))

        def computed(some: torch.Tensor) -> torch.Tensor:
            """Of a tile, or of some one after the other, as newer ComfyUIs ask for them."""
            asked = list(itertools.islice(numbers, len(some) // x.shape[0]))
            # By their bytes, as NaN is no NaN.
            if not asked or not torch.equal(as_bytes(some), as_bytes(torch.cat([parts[number] for number in asked]))):
                raise NotImplementedError(f"{type(vae).__name__} cuts tiles in another order")
            return torch.cat([of_all[number % ranks, number // ranks] for number in asked])

        with replaced(vae, tiles.one, computed):
            return whole(x)

    blocks = getattr(getattr(vae, name), tiles.blocks, ())
    compiling = compiled().running(blocks) if compiled and blocks else contextlib.nullcontext()
    with compiling, replaced(vae, tiles.whole, run):
        yield
