"""A stage of a ComfyUI network: the network's own forward, in which blocks of other stages hand their streams through.

The block in front of a stage's first returns what the stage before sent; the stage's last sends what it returns. So
whatever the network does between blocks (joining streams) it does on the stage that needs it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .block_call import BlockCall
from .blocks import Blocks
from .token_split import Streams, TokenSplit, put, take

Receive = Callable[[Mapping[str, torch.Size]], Mapping[str, torch.Tensor]]
"""Shapes of this patch's tokens of each stream -> what the stage before sent."""
Send = Callable[[Mapping[str, torch.Tensor]], None]


class Neighbours:
    """What the stages beside this one are asked for; set for each forward."""

    def __init__(self) -> None:
        self.receive: Receive | None = None
        self.send: Send | None = None


def keep_stage(
    network: nn.Module, lists: Sequence[Blocks], split: TokenSplit, owned: tuple[int, int], neighbours: Neighbours
) -> None:
    """Keep the blocks from owned[0] up to owned[1], in the order of the lists; the others' weights go.

    Args:
        network: after `cut_blocks`.
    """
    found = [(blocks, block) for blocks in lists for block in network.get_submodule(blocks.path).children()]
    for index, (blocks, block) in enumerate(found):
        edge = _Edge(block, blocks, split, neighbours)
        if index == owned[0] - 1:
            block.forward = edge.take_over
        elif not owned[0] <= index < owned[1]:
            block.forward = edge.hand_through
        elif index == owned[1] - 1 and owned[1] < len(found):
            block.forward = edge.run_and_send
        if not owned[0] <= index < owned[1]:
            block.to("meta")


class _Edge:
    """One block at the edge of a stage, or beyond it."""

    def __init__(self, block: nn.Module, blocks: Blocks, split: TokenSplit, neighbours: Neighbours):
        self._forward = block.forward
        self._signature = inspect.signature(getattr(block.forward, "_signature_of", type(block).forward))
        parameters = list(self._signature.parameters.values())[1:]
        self._signature = self._signature.replace(parameters=parameters)
        self._blocks, self._split, self._neighbours = blocks, split, neighbours

    def hand_through(self, *args: Any, **kwargs: Any) -> Any:
        """Return the streams as they came."""
        whole, _ = self._streams(args, kwargs)
        return self._returned(whole)

    def take_over(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the stage before sent, in its place among all tokens."""
        whole, streams = self._streams(args, kwargs)
        dims, intervals = self._blocks.tokens, self._intervals(whole, streams)
        shapes = {
            name: torch.Size(
                (*each.shape[: dims[name]], intervals[name][1] - intervals[name][0], *each.shape[dims[name] + 1 :])
            )
            for name, each in whole.items()
        }
        assert self._neighbours.receive is not None
        received = self._neighbours.receive(shapes)
        return self._returned(
            {name: put(received[name], dims[name], intervals[name], whole[name].shape[dims[name]]) for name in whole}
        )

    def run_and_send(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block and send the patch's tokens of what it returns."""
        whole, streams = self._streams(args, kwargs)
        intervals = self._intervals(whole, streams)
        returned = self._forward(*args, **kwargs)
        outputs = returned if isinstance(returned, (tuple, list)) else (returned,)
        by_name = dict(zip(self._blocks.returns, outputs, strict=True))
        assert self._neighbours.send is not None
        self._neighbours.send(
            {name: take(by_name[name], self._blocks.tokens[name], [intervals[name]]) for name in whole}
        )
        return returned

    def _streams(self, args: Any, kwargs: Any) -> tuple[dict[str, torch.Tensor], Streams]:
        call = BlockCall(self._signature, self._blocks.positional, args, kwargs)
        whole = {name: call[name] for name in self._blocks.tokens}
        lengths = {name: each.shape[self._blocks.tokens[name]] for name, each in whole.items()}
        assert self._split.patch is not None
        return whole, self._split.patch.share_out(self._blocks, lengths)

    @staticmethod
    def _intervals(whole: Mapping[str, torch.Tensor], streams: Streams) -> dict[str, tuple[int, int]]:
        return {name: streams.only(index).intervals()[0] for index, name in enumerate(whole)}

    def _returned(self, streams: Mapping[str, torch.Tensor]) -> Any:
        values = tuple(streams[name] for name in self._blocks.returns if name is not None)
        return values[0] if len(values) == 1 else values
