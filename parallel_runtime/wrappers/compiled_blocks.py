"""Regional torch.compile: a transformer's repeated blocks, one graph for all of a kind, and what it is told.

A graph must not depend on what was compiled before it, or by coincidence on sizes that are equal: another process
compiles it ahead (pipeline/compile_ahead.py), and ours finds it on disk only if both ask for the same. So the number of
tokens is left open from the start, and PyTorch is kept from finding open sizes by itself.

Imports private parts of torch, so it is imported where blocks are compiled, and nowhere else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._dynamo
import torch.fx.experimental._config as symbolic_shapes
from torch import nn
from torch._inductor.virtualized import V

from ..attention.varying import leave_open
from ..switches import is_on
from .reductions import RowsAtOnce
from .rewrites import Rewrites

_RECOMPILES = 64
"""Graphs per kind of block: batches, meshes and uneven shares each may need one. PyTorch's 8 is soon used up, and with
fullgraph the ninth is an error."""


class CompiledBlocks:
    """Blocks that are compiled where they lie; each when it first runs.

    Args:
        together: see `Rewrites`.
    """

    def __init__(self, blocks: Sequence[nn.Module], together: bool):
        self._blocks = blocks
        self._options = {"pre_grad_custom_pass": Rewrites(together, enabled=is_on("rewrites"))}
        self._calls: list[Any] = []
        for block in blocks:
            block.compile(fullgraph=True, options=self._options)
            call: Any = block._compiled_call_impl
            self._calls.append(None if call is None else _with_open_sizes(call))  # None: torch.compile is switched off
        self.use(True)

    def use(self, compiled: bool) -> None:
        """Run what is compiled, or the blocks as they are, from the next forward on."""
        for block, call in zip(self._blocks, self._calls, strict=True):
            block._compiled_call_impl = call if compiled else None  # what Module.compile sets

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """What must hold around every forward, as any may be the first of its kind."""
        dynamo = torch._dynamo.config
        limit = "recompile_limit" if hasattr(dynamo, "recompile_limit") else "cache_size_limit"  # torch 2.6
        # The options of a block come too late for a pass as early as ours in torch 2.6, so they hold all around.
        options = torch._inductor.config.patch(self._options)
        sizes = symbolic_shapes.patch(use_duck_shape=False)  # type: ignore[attr-defined]
        own = dynamo.patch({limit: _RECOMPILES, "automatic_dynamic_shapes": False})
        with own, sizes, options, V.set_choices_handler(RowsAtOnce()):
            yield

    def undo(self) -> None:
        """Leave the blocks as they were."""
        self.use(False)


def _with_open_sizes(call: Any) -> Callable[..., Any]:
    """Leave the number of tokens open in every tensor that a block gets."""

    def called(*args: Any, **kwargs: Any) -> Any:
        for argument in (*args, *kwargs.values()):
            _leave_tokens_open(argument)
        return call(*args, **kwargs)

    return called


def _leave_tokens_open(argument: Any) -> None:
    """(batch, tokens, ...), and (tokens, head dim) of a rotary embedding; of a modulation the batch."""
    if isinstance(argument, torch.Tensor):
        if argument.dim() > 1:
            leave_open(argument, 1 if argument.dim() > 2 else 0)
    elif isinstance(argument, list | tuple):
        for part in argument:
            _leave_tokens_open(part)
