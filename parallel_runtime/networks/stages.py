"""A stage of a network: the network's own forward, in which blocks of other stages hand their streams through.
The block in front of a stage's first returns what the stage before sent; the stage's last sends what it returns. So
whatever the network does between blocks (joining streams) it does on the stage that needs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedModelError
from .block_arguments import BlockCall
from .cut_blocks import CutBlock
from .latent_patches import LatentPatch
from .shares import Streams
from .tables.blocks import Blocks, Network
from .token_split import TokenSplit, take

Receive = Callable[[Mapping[str, torch.Size], torch.dtype], Mapping[str, Tensor]]
"""(shapes of this rank's tokens of each stream, their type) -> what the stage before sent."""
Send = Callable[[Mapping[str, Tensor]], None]


class StageBlocks:
    """The blocks of a network, after `cut_blocks`, as the stage has them that owns (start, stop); made, in place."""

    def __init__(self, network: nn.Module, data: Network, split: TokenSplit, owned: tuple[int, int]):
        self.owned = owned
        self.patch = split.patch = LatentPatch(data.behind)
        self.receive: Receive | None = None  # from the stage before; like the next one set for each forward
        self.send: Send | None = None
        self.outputs: dict[int, Tensor] = {}  # of blocks by their index, that a block of the second half takes
        self._split = split
        self._cut = [(block, block.forward) for block in all_blocks(network, data.blocks)]
        for index, (block, cut) in enumerate(self._cut):
            assert isinstance(cut, CutBlock)
            block.forward = partial(self._run, index, cut)

    def awaited(self, boundary: int) -> list[int]:
        """Blocks before a boundary whose outputs blocks behind it take, but for the last, which is the stream."""
        count = len(self._cut)
        return [index for index in range(min(boundary - 1, count // 2 - 1)) if count - 1 - index >= boundary]

    def forget(self) -> None:
        """Let go of what a run has left on the device."""
        self.patch.clear()
        self.outputs.clear()
        self.receive = self.send = None

    def undo(self) -> None:
        """Have the network with all its blocks again, as far as they have weights."""
        for block, cut in self._cut:
            block.forward = cut
        self._split.patch = None

    def _run(self, index: int, cut: CutBlock, *args: Any, **kwargs: Any) -> Any:
        """A block's forward, and what the stages beside this one have to do with it."""
        start, stop = self.owned
        if start <= index < stop:
            returned = cut(*args, **kwargs)
            if index == stop - 1 and stop < len(self._cut):
                self._send_own(index, cut, *self._streams(cut, args, kwargs), returned)
        else:
            whole, shares = self._streams(cut, args, kwargs)
            if index == start - 1:
                whole = self._take_over(index, cut, whole, shares)
            elif cut.blocks.skips:  # what a later block takes of this one comes with the streams of its stage
                whole = {name: torch.empty_like(each) for name, each in whole.items()}
            values = tuple(whole[name] for name in cut.blocks.returns if name is not None)
            returned = values[0] if len(values) == 1 else values
        if cut.blocks.skips:
            self.outputs[index] = returned
        return returned

    def _take_over(
        self, index: int, cut: CutBlock, whole: Mapping[str, Tensor], shares: Mapping[str, Streams]
    ) -> dict[str, Tensor]:
        """What the stage before sent, in its place among all tokens."""
        own = self._own(index, cut.blocks, whole, shares)
        assert self.receive is not None
        dtype = next(iter(whole.values())).dtype
        received = self.receive({name: each.shape for name, each in own.items()}, dtype)
        for name in own.keys() - whole.keys():
            own[name].copy_(received[name])
        return {name: cut.put_in_place(received[name], name, shares[name]) for name in whole}

    def _send_own(
        self, index: int, cut: CutBlock, whole: Mapping[str, Tensor], shares: Mapping[str, Streams], returned: Any
    ) -> None:
        """Send this rank's tokens of what the stage's last block returned."""
        outputs = returned if isinstance(returned, (tuple, list)) else (returned,)
        by_name = dict(zip(cut.blocks.returns, outputs, strict=True))
        if any(by_name[name].dtype != whole[name].dtype for name in whole):  # the next stage reckons with that
            what = "Blocks of {path} change the type of their tokens, which stages cannot."
            raise UnsupportedModelError(what, "Set stages to 1.", path=cut.blocks.path)
        assert self.send is not None
        self.send(self._own(index, cut.blocks, {name: by_name[name] for name in whole}, shares))

    def _own(
        self, index: int, blocks: Blocks, whole: Mapping[str, Tensor], shares: Mapping[str, Streams]
    ) -> dict[str, Tensor]:
        """This rank's tokens of the streams, and of what later blocks take, by their names in messages. Views."""
        dims, first = blocks.tokens, next(iter(whole))
        own = {name: take(each, dims[name], shares[name].intervals()) for name, each in whole.items()}
        for before in self.awaited(index + 1) if blocks.skips else ():
            own[f"skip {before}"] = take(self.outputs[before], dims[first], shares[first].intervals())
        return own

    def _streams(self, cut: CutBlock, args: Any, kwargs: Any) -> tuple[dict[str, Tensor], dict[str, Streams]]:
        call = BlockCall(cut.signature, cut.blocks.positional, args, kwargs)
        whole = {name: call[name] for name in cut.blocks.tokens}
        streams = self._split.share_out(cut.blocks, whole)
        return whole, {name: streams.only(index) for index, name in enumerate(whole)}


class Stages:
    """A network that runs with all its blocks, or as one stage. `data` is None of one that is not cut; `owned` is
    (start, stop) of the blocks that have weights, None: all."""

    def __init__(self, network: nn.Module, data: Network | None, split: TokenSplit, owned: tuple[int, int] | None):
        self.now: StageBlocks | None = None  # as which it runs; None: with all its blocks
        self.split = split
        self._of = network, data
        self._owned = owned

    @property
    def owned(self) -> tuple[int, int] | None:
        """(start, stop) of the blocks that it runs; None: all."""
        return self._owned if self.now is None else self.now.owned

    def run_as(self, owned: tuple[int, int] | None) -> None:
        """Run as the stage with these blocks from the next call on; None: with all."""
        if self.now is not None:
            if self.now.owned == owned:
                return
            self.now.undo()
            self.now = None
        if owned is not None:
            network, data = self._of
            assert data is not None
            self.now = StageBlocks(network, data, self.split, owned)


def all_blocks(network: nn.Module, lists: Sequence[Blocks]) -> list[nn.Module]:
    """Of all lists, in the order in which they run."""
    return [block for blocks in lists for block in network.get_submodule(blocks.path).children()]


def let_go(network: nn.Module, lists: Sequence[Blocks], owned: tuple[int, int] | None) -> None:
    """Let the weights of blocks go that other stages have: of all but the owned ones (start, stop); None: all are."""
    if owned is None:
        return
    blocks = all_blocks(network, lists)
    for block in [*blocks[: owned[0]], *blocks[owned[1] :]]:
        for module in block.modules():
            for name, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
                setattr(module, name, None)
