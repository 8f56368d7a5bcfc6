"""What one rank says to networks that are not as the data says: no ComfyUI is needed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import nn

from parallel_runtime.attention.kernels import KERNELS
from parallel_runtime.config import ParallelPlan
from parallel_runtime.errors import UnsupportedModelError
from parallel_runtime.mesh.mesh import build_mesh
from parallel_runtime.networks.block_attention import BlockAttention
from parallel_runtime.networks.comfyui.prepared_network import ask_the_split
from parallel_runtime.networks.cut_blocks import cut_blocks
from parallel_runtime.networks.facts import unknown_blocks
from parallel_runtime.networks.tables.blocks import Blocks
from parallel_runtime.networks.token_split import TokenSplit

BLOCKS = Blocks("blocks", {"x": 1}, ("x",), rows={"e": ("x", 1)}, whole_with=("cache",))
LIKE = replace(BLOCKS)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, mask: torch.Tensor | None = None, **_: Any
) -> torch.Tensor:
    """ComfyUI's attention, with one head."""
    bias = 0.0 if mask is None else mask.squeeze(1)
    return (q @ k.mT / q.shape[-1] ** 0.5 + bias).softmax(-1) @ v


HOST = ModuleType("host_of_unlike")
HOST.optimized_attention = attend  # type: ignore[attr-defined]


class Block(nn.Module):
    """Attends through a name of its module's, as some of ComfyUI's do."""

    window: int | None = None

    def forward(self, x: torch.Tensor, e: torch.Tensor | None = None, cache: Any = None) -> torch.Tensor:
        mask = None
        if self.window is not None:
            places = torch.arange(x.shape[1])
            mask = torch.zeros(1, 1, x.shape[1], x.shape[1])
            mask[..., (places[:, None] - places).abs() > self.window] = -1e9
        y = x + HOST.optimized_attention(x, x, x, 1, mask)
        return y if e is None else y * e


class Fewer(Block):
    """Returns not all tokens."""

    def forward(self, x: torch.Tensor, e: torch.Tensor | None = None, cache: Any = None) -> torch.Tensor:
        return super().forward(x, e, cache)[:, 1:]


class Other(Block):
    """Attends to other tokens."""

    def forward(self, x: torch.Tensor, e: torch.Tensor | None = None, cache: Any = None) -> torch.Tensor:
        other = torch.ones(1, 5, x.shape[2])
        return x + HOST.optimized_attention(x, other, other, 1)


class Newer(Block):
    """Takes one more argument."""

    def forward(self, x: torch.Tensor, e: Any = None, cache: Any = None, more: Any = None) -> torch.Tensor:
        return x


def unlike(rank: int, world_size: int) -> dict[str, str]:
    """What is said to each."""
    mesh = build_mesh(ParallelPlan(ulysses=world_size), rank, world_size)
    sys.modules[HOST.__name__] = HOST
    ask_the_split([HOST.__name__])
    x = torch.randn(1, 7, 4, generator=torch.Generator().manual_seed(0))

    def said(
        kind: type[Block],
        run: Callable[[nn.ModuleList], Any],
        data: Blocks = BLOCKS,
        without: bool = False,
        **more: Any,
    ) -> str:
        network = nn.Module()
        network.blocks = nn.ModuleList(kind() for _ in range(2))
        for block in network.blocks:
            vars(block).update(more)
        if reason := unknown_blocks(network, (data,)):
            return reason
        split = TokenSplit(mesh)
        split.attention = None if without else BlockAttention(KERNELS["sdpa"], split)
        expected = run(network.blocks) if data is LIKE else None
        cut_blocks(network, (data,), split)
        try:
            found = run(network.blocks)
        except (UnsupportedModelError, ValueError) as error:
            return str(error)
        return str(expected is not None and torch.allclose(found, expected, atol=1e-5))

    def both(blocks: nn.ModuleList, **more: Any) -> torch.Tensor:
        return blocks[1](blocks[0](x, **more), **more)

    return {
        "like": said(Block, both, LIKE),
        "cache": said(Block, lambda blocks: both(blocks, cache=1), LIKE),
        "cache of one": said(Block, lambda blocks: blocks[1](blocks[0](x), cache=1)),
        "rows": said(Block, lambda blocks: both(blocks, e=torch.ones(1, 3, 4))),
        "object": said(Block, lambda blocks: both(blocks, e=object())),
        "window": said(Block, both, window=2),
        "window told": said(Block, both, replace(BLOCKS, when={"window": None}), window=2),
        "other order told": said(Block, both, replace(BLOCKS, unless={"flipped": True}), flipped=True),
        "fewer": said(Fewer, both),
        "other": said(Other, both),
        "newer": said(Newer, both),
        "no attention": said(Block, both, without=True),
        "no split": str(HOST.optimized_attention(x, x, x, 1).equal(attend(x, x, x, 1))),
    }
