"""A rank's share of what all blocks are given alike: copied once in a forward."""

from __future__ import annotations

import inspect

import torch

from parallel_runtime.networks.block_arguments import BlockCall, Joined, OwnArguments
from parallel_runtime.networks.tables.blocks import Blocks
from parallel_runtime.networks.token_split import Streams

BLOCKS = Blocks("blocks", {"txt": 1, "img": 1}, ("img", "txt"), joint={"pe": 2})


def forward(img: torch.Tensor, txt: torch.Tensor, pe: torch.Tensor) -> None:
    """A block of two streams."""


def test_a_rotary_table_is_joined_once_for_all_blocks_and_anew_for_another_table_or_share():
    img, txt, table, other = (torch.randn(1, *shape) for shape in ((6, 2), (4, 2), (1, 10, 3), (1, 10, 3)))
    own, joined = OwnArguments(BLOCKS, AssertionError), Joined()

    def cut(pe: torch.Tensor, index: int) -> torch.Tensor:
        call = BlockCall(inspect.signature(forward), (), (img, txt, pe), {})
        streams = Streams((4, 6), ((2, 2), (3, 3)), index, (0, 0), (True, True))
        own.cut(call, own.tokens(call), streams, joined)
        assert call["pe"].equal(pe[:, :, [0, 1, 4, 5, 6] if index == 0 else [2, 3, 7, 8, 9]])
        return call["pe"]

    first = cut(table, 0)
    assert cut(table, 0) is first
    assert cut(other, 0) is not first
    cut(table, 1)
    assert cut(table, 0) is first
