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
from .cut_blocks import CutBlock, can_be_cut
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
        self.receive: Receive | None = None
        """What the stages beside this one are asked for, and told; set for each forward."""
        self.send: Send | None = None
        self.outputs: dict[int, Tensor] = {}  # of blocks by their index, that a block of the second half takes
        self._split = split
        self._cut = [(block, block.forward) for block in all_blocks(network, data.blocks)]
        for index, (block, cut) in enumerate(self._cut):
            assert isinstance(cut, CutBlock)
            if index == owned[0] - 1:
                block.forward = partial(self._take_over, index, cut)
            elif not owned[0] <= index < owned[1]:
                block.forward = partial(self._hand_through, index, cut)
            elif index == owned[1] - 1 and owned[1] < len(self._cut):
                block.forward = partial(self._run_and_send, index, cut)
            elif cut.blocks.skips:
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
        """Run a block whose output a later one takes."""
        return self._noted(index, cut, cut(*args, **kwargs))

    def _hand_through(self, index: int, cut: CutBlock, *args: Any, **kwargs: Any) -> Any:
        """Return the streams as they came; what a later block takes of them comes with the streams of its stage."""
        whole, _ = self._streams(cut, args, kwargs)
        if cut.blocks.skips:
            whole = {name: torch.empty_like(each) for name, each in whole.items()}
        return self._noted(index, cut, _returned(cut.blocks, whole))

    def _take_over(self, index: int, cut: CutBlock, *args: Any, **kwargs: Any) -> Any:
        """Return what the stage before sent, in its place among all tokens."""
        whole, shares = self._streams(cut, args, kwargs)
        own = self._own(index, cut.blocks, whole, shares)
        assert self.receive is not None
        dtype = next(iter(whole.values())).dtype
        received = self.receive({name: each.shape for name, each in own.items()}, dtype)
        for name in own.keys() - whole.keys():
            own[name].copy_(received[name])
        streams = {name: cut.put_in_place(received[name], name, shares[name]) for name in whole}
        return self._noted(index, cut, _returned(cut.blocks, streams))

    def _run_and_send(self, index: int, cut: CutBlock, *args: Any, **kwargs: Any) -> Any:
        """Run the block and send this rank's tokens of what it returns."""
        whole, shares = self._streams(cut, args, kwargs)
        returned = cut(*args, **kwargs)
        outputs = returned if isinstance(returned, (tuple, list)) else (returned,)
        by_name = dict(zip(cut.blocks.returns, outputs, strict=True))
        if any(by_name[name].dtype != whole[name].dtype for name in whole):  # the next stage reckons with that
            what = "Blocks of {path} change the type of their tokens, which stages cannot."
            raise UnsupportedModelError(what, "Set stages to 1.", path=cut.blocks.path)
        assert self.send is not None
        self.send(self._own(index, cut.blocks, {name: by_name[name] for name in whole}, shares))
        return self._noted(index, cut, returned)

    def _noted(self, index: int, cut: CutBlock, returned: Any) -> Any:
        if cut.blocks.skips:
            self.outputs[index] = returned
        return returned

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


def _returned(blocks: Blocks, streams: Mapping[str, Tensor]) -> Any:
    values = tuple(streams[name] for name in blocks.returns if name is not None)
    return values[0] if len(values) == 1 else values


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


def has_stages(network: nn.Module, data: Network, patch: Sequence[int]) -> bool:
    """Whether stages can work on patches of the latent, of which a token takes `patch` positions, by the last dims."""
    lists = ((blocks, network.get_submodule(blocks.path).children()) for blocks in data.blocks)
    known = data.stages and all(can_be_cut(block, blocks) for blocks, found in lists for block in found)
    return known and len(patch) > 1 and patch[-1] == patch[-2] and set(patch[:-2]) <= {1}


def let_go(network: nn.Module, lists: Sequence[Blocks], owned: tuple[int, int] | None) -> None:
    """Let the weights of blocks go that other stages have: of all but the owned ones (start, stop); None: all are."""
    if owned is None:
        return
    blocks = all_blocks(network, lists)
    for block in [*blocks[: owned[0]], *blocks[owned[1] :]]:
        for module in block.modules():
            for name, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
                setattr(module, name, None)
