"""Cuts the blocks of a network: outside of them tensors have the whole shape, inside a rank has its tokens.

The network's own forward runs on every rank. A block takes this rank's rows of its token arguments and puts its rows
back into a tensor of the whole shape; what stands in the other rows is never read, as nothing outside of blocks mixes
tokens. Rows are gathered after the last block of a list; where a patch sees what blocks return, after every block."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedModelError
from ..requests.patches import FUNCTIONS, SIGMAS
from .attention_operator import in_order
from .block_arguments import GRID, BlockCall, OwnArguments, is_guide_mask, name_argument
from .modulation import Layers, Modulation
from .shares import Streams
from .tables.blocks import Blocks, find
from .token_split import TokenSplit, over_all_tokens, put, take
from .traced import TRACED

SPLIT_NO_TOKENS = "Set ulysses and ring to 1 in Parallel Config; CFG branches and pictures are still shared out."
"""What helps where a network is not as its data says."""
# Patches that ComfyUI calls inside of a block, with the tokens that the block has.
_INSIDE = {"attn1_patch", "attn2_patch", "attn1_output_patch", "attn2_output_patch", "mlp_patch"}
_BEFORE = {"post_input"}  # those that it calls before all blocks; others see what blocks return


def cut_blocks(network: nn.Module, lists: Sequence[Blocks], split: TokenSplit) -> None:
    """Let the ranks of `split` share out the tokens of these lists of blocks."""
    split.modulation = Modulation()
    for blocks in lists:
        found = list(network.get_submodule(blocks.path).children())
        fits = [*(blocks.can_cut(block) for block in found), False]
        for index, block in enumerate(found):
            if not fits[index]:
                continue
            for where in ("cross", "gathers"):
                for name in getattr(blocks, where):
                    _inside(find(block, name), where, split)
            for name in blocks.apart:
                _apart(find(block, name), split)
            block.forward = CutBlock(block, blocks, split, last=not fits[index + 1])


def _inside(module: nn.Module, where: str, split: TokenSplit) -> None:
    """Have a module's forward run inside of `split.inside(where)`, of which attention in a compiled block is told."""
    forward = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            before, TRACED.where = TRACED.where, where
            returned = forward(*args, **kwargs)
            TRACED.where = before
            return returned
        with split.inside(where):
            return forward(*args, **kwargs)

    module.forward = run


def _apart(module: nn.Module, split: TokenSplit) -> None:
    """Have a module's forward see as many tokens (B, tokens, D) as there are, of which own ones are true."""
    forward = module.forward

    def run(own: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if split.streams is None:
            return forward(own, *args, **kwargs)
        (length,), ((start, stop),) = split.streams.lengths, split.streams.intervals()
        with split.outside():
            return forward(put(own, 1, (start, stop), length), *args, **kwargs)[:, start:stop]

    module.forward = run


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Of a compiled block the storage may be another one over the same memory (acceleration/compiled_methods.py)."""
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride() and one.shape == other.shape


def keep_whole(block: nn.Module, split: TokenSplit) -> None:
    """Have every rank compute a block whole, compiled where blocks are."""
    forward = block.forward

    def whole(*args: Any, **kwargs: Any) -> Any:
        run = split.run_block
        return forward(*args, **kwargs) if run is None else run(forward, args, kwargs, _all_tokens)

    block.forward = whole


def _all_tokens(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Any, int]]:
    """The tokens of (batch, tokens, width), which all arguments of such a block are."""
    return [(each, 1) for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor) and each.ndim > 2]


class CutBlock:
    """The forward of one block on this rank's tokens."""

    def __init__(self, block: nn.Module, blocks: Blocks, split: TokenSplit, last: bool):
        self._forward = block.forward
        function = getattr(block.forward, "__func__", None)
        if function is not None and (blocks.alone or blocks.gathers):  # several exchanges
            self._forward = MethodType(in_order(function), block)
        self.signature = inspect.signature(block.forward)
        self.blocks = blocks
        self._split = split
        self.last = last
        self._modulated: Layers = split.modulation.add(block, blocks)
        self._own = OwnArguments(blocks, self._unlike)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        split, blocks = self._split, self.blocks
        alone = split.degree == 1 and split.patch is None
        if alone and not self._modulated:
            return self._compute(args, kwargs)
        call = BlockCall(self.signature, blocks.positional, args, kwargs)
        for name, layers in self._modulated.items():
            split.modulation.before(name, call[name], layers)
        if alone:
            return self._compute(args, kwargs)
        if unknown := call.others - blocks.names:
            raise self._unlike(f"takes {', '.join(sorted(unknown))}")
        whole = self._own.tokens(call)
        shapes = {name: call[name].shape for name in whole}
        streams = split.share_out(blocks, whole)
        options = call["transformer_options"] or {}
        inside = _INSIDE & set(options.get("patches") or {})
        needs_all = self._needs_all(call, inside)
        if needs_all and split.patch is not None:
            raise self._unlike("needs all tokens, which no stage has")
        if needs_all or not (streams.enough or split.patch):  # of a handful of tokens every rank computes all
            if blocks.path in split.pending:
                raise self._unlike("needs all tokens, where the one before it did not")
            return self._compute(args, kwargs)
        returned = self._compute_own(call, whole, streams, inside)
        outputs = returned if isinstance(returned, (tuple, list)) else (returned,)
        if len(outputs) != len(blocks.returns):
            raise self._unlike(f"returns {len(outputs)} values, not {len(blocks.returns)}")
        shares = {name: streams.only(index) for index, name in enumerate(whole)}
        made, gather = list(outputs), self._gathers(options)
        for index, stream in enumerate(blocks.returns):
            if stream is not None and (own := made[index]) is not None:
                made[index] = self._whole_again(own, stream, shapes[stream], whole[stream], shares[stream], gather)
        (split.pending.discard if gather or split.patch else split.pending.add)(blocks.path)
        return type(returned)(made) if isinstance(returned, (tuple, list)) else made[0]

    def _needs_all(self, call: BlockCall, inside: set[str]) -> bool:
        """Whether every rank computes the block whole, with these patches inside of it."""
        blocks, kept = self.blocks, call[self.blocks.kept]
        self._split.keeps |= kept == ()
        if kept and not (isinstance(kept, tuple) and len(kept) == 3 and isinstance(kept[2], int)):
            raise self._unlike(f"takes {name_argument(kept)} as {blocks.kept}")
        if any(call[name] is not None for name in blocks.whole_with) or not inside <= set(blocks.patched):
            return True
        return bool(blocks.kept) and not kept

    def _compute_own(
        self, call: BlockCall, whole: Mapping[str, torch.Tensor], streams: Streams, inside: set[str]
    ) -> Any:
        """What the block returns for this rank's tokens."""
        split, blocks, kept = self._split, self.blocks, call[self.blocks.kept]
        by_guide = any(is_guide_mask(call[name]) for name in blocks.rows)
        self._own.cut(call, whole, streams, split.joined)
        if inside:
            options = call["transformer_options"]
            patches = options["patches"]
            over_all = {name: [over_all_tokens(each, split) for each in patches[name]] for name in inside}
            call["transformer_options"] = {**options, "patches": {**patches, **over_all}}
        by_itself = list(whole).index(blocks.alone) if blocks.alone else None
        first, length = next(iter(whole.values())), streams.lengths[0]
        batch = first.numel() // (length * first.shape[-1])  # tokens may be on the first dim, too
        with split.running(streams, batch, first.device, by_itself, by_guide, kept[2] if kept else 0):
            # What reads how the tokens are shared out, or exchanges in pieces, whose order a graph does not keep.
            if inside or by_guide or kept or blocks.apart:
                return self._forward(*call.args, **call.kwargs)
            return self._compute(call.args, call.kwargs)

    def _gathers(self, options: Mapping[str, Any]) -> bool:
        """Whether rows are gathered behind this block: it is the last of a list, or patches see what it returns."""
        if self._split.patch is not None:  # the rest of the tokens is at another time's
            return self.last and self._split.degree > 1
        replaced = any((options.get("patches_replace") or {}).values())
        return self.last or replaced or bool(set(options.get("patches") or {}) - _INSIDE - _BEFORE)

    def _compute(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        run = self._split.run_block
        if run is None:
            return self._forward(*args, **kwargs)
        if self._split.functions:
            call = BlockCall(self.signature, self.blocks.positional, args, kwargs)
            if options := call["transformer_options"]:
                left_out = (*FUNCTIONS, SIGMAS)
                call["transformer_options"] = {name: options[name] for name in options if name not in left_out}
            args, kwargs = call.args, call.kwargs
        return run(self._forward, args, kwargs, self._varying)

    def _varying(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Any, int]]:
        """Arguments that have tokens, or rows or columns for such, with the dims that these are on."""
        blocks = self.blocks
        call = BlockCall(self.signature, blocks.positional, args, kwargs)
        rows = {name: dim for name, (_, dim) in blocks.rows.items()}
        dims = {**blocks.tokens, **blocks.joint, **blocks.longer, **rows}
        lengths = {name: GRID if name in blocks.grids else 1 for name in dims}
        sizes = [(call[name], dim + further) for name, dim in dims.items() for further in range(lengths[name])]
        masks = [(call[name], dim) for name in blocks.alike if name.endswith("mask") for dim in (-2, -1)]
        return sizes + masks + [(call[name], 0) for name in blocks.segments]

    def _whole_again(
        self, output: torch.Tensor, name: str, shape: torch.Size, given: torch.Tensor, share: Streams, gather: bool
    ) -> torch.Tensor:
        dim, interval = self.blocks.tokens[name], share.intervals()[0]
        grid = shape[dim : dim + (GRID if name in self.blocks.grids else 1)]
        flat = output.flatten(dim, dim + len(grid) - 1)
        if flat.shape[dim] != share.own[0]:
            raise self._unlike(f"returns {name_argument(output)} as {name} of {share.own[0]} tokens")
        if not gather and _is_same(flat, take(given, dim, [interval])):
            whole = given  # the block wrote into it (FLUX)
        elif self._split.patch is not None:
            whole = self.put_in_place(flat, name, share)
        elif not gather:
            whole = put(flat, dim, interval, share.total)
        else:  # as a block's own output is: some networks take views of it
            whole = self._split.gather(flat, dim, share.total).contiguous()
        return whole.unflatten(dim, grid)

    def put_in_place(self, own: torch.Tensor, name: str, share: Streams) -> torch.Tensor:
        """A patch's tokens of a stream among all tokens; behind the last block of a list, those of all ranks."""
        dim, (span,), (interval,) = self.blocks.tokens[name], share.spans(), share.intervals()
        if self.last and share.shared[0] and self._split.degree > 1:
            own, interval = self._split.gather(own, dim, span[1] - span[0]), span
        placed = put(own, dim, interval, share.total)
        if self.last:  # a quantised layer behind takes its scale from all rows
            placed.narrow(dim, 0, interval[0]).zero_()
            placed.narrow(dim, interval[1], share.total - interval[1]).zero_()
        return placed

    def _unlike(self, what: str) -> UnsupportedModelError:
        text = "A block of {path} {what}: this ComfyUI's network is not the one whose tokens can be split."
        return UnsupportedModelError(text, SPLIT_NO_TOKENS, path=self.blocks.path, what=what)
