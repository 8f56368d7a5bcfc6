"""Tiles that a VAE cuts by itself, in whatever calls it asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from parallel_runtime.vae.families import Tiles
from parallel_runtime.vae.rows import Rows
from parallel_runtime.vae.tiles import shared_tiles


class Tiled:
    """Four tiles in a row, asked for in these calls."""

    vae_ratio = 1
    decoder: Any = None

    def __init__(self, calls: Sequence[Sequence[int]]):
        self.calls = calls

    def split_tiles(self, length: int) -> tuple[list[int], list[int], list[int]]:
        return list(range(0, length, 2)), [2] * (length // 2), []

    def one(self, some: torch.Tensor) -> torch.Tensor:
        return some * 3

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        tiles = x.split(2, -1)
        made = [self.one(torch.cat([tiles[number] for number in call])).split(len(x)) for call in self.calls]
        return torch.cat([tile for call in made for tile in call], -1)


def decode(calls: Sequence[Sequence[int]]) -> torch.Tensor:
    """Of a picture of two in a batch, by one rank, two tiles at once."""
    vae, x = Tiled(calls), torch.arange(16.0).reshape(2, 1, 1, 1, 8).repeat(1, 1, 1, 2, 1)
    x[0, 0, 0, 0, 5] = torch.nan
    counted: list[None] = []
    with shared_tiles(
        vae, "decoder", Tiles("whole", "one", 2), Rows(0, (1,), lambda: None), lambda: counted.append(None), None
    ):
        made = vae.whole(x)
    assert len(counted) == 2
    torch.testing.assert_close(made, x * 3, rtol=0, atol=0, equal_nan=True)
    return made


@pytest.mark.parametrize("calls", [[[0], [1], [2], [3]], [[0, 1, 2], [3]], [[0, 1, 2, 3]]])
def test_tiles_are_given_in_the_calls_that_the_vae_makes(calls):
    decode(calls)


@pytest.mark.parametrize("calls", [[[1], [0], [2], [3]], [[0, 2], [1, 3]], [[0, 1, 2, 3], [0]]])
def test_an_order_that_is_not_known_is_no_picture(calls):
    with pytest.raises(NotImplementedError, match="Tiled cuts tiles in another order"):
        decode(calls)
