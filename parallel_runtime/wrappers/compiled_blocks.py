"""Regional torch.compile: a transformer's repeated blocks, one graph for all of a kind, and what it is told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch._inductor.virtualized import V

from .reductions import RowsAtOnce
from .rewrites import Rewrites

_RECOMPILES = 64
"""Graphs per kind of block: sizes, batches, meshes and uneven shares each may need one. PyTorch's 8 is soon used up,
and with fullgraph the ninth is an error."""


class CompiledBlocks:
    """Blocks that are compiled where they lie; each when it first runs.

    Args:
        together: see `Rewrites`.
    """

    def __init__(self, blocks: Sequence[nn.Module], together: bool):
        self._blocks = blocks
        self._options = {"pre_grad_custom_pass": Rewrites(together)}
        for block in blocks:
            block.compile(fullgraph=True, options=self._options)

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """What must hold around every forward, as any may be the first of its kind."""
        dynamo = torch._dynamo.config
        limit = "recompile_limit" if hasattr(dynamo, "recompile_limit") else "cache_size_limit"  # torch 2.6
        # The options of a block come too late for a pass as early as ours in torch 2.6, so they hold all around.
        options = torch._inductor.config.patch(self._options)
        with dynamo.patch({limit: _RECOMPILES}), options, V.set_choices_handler(RowsAtOnce()):
            yield

    def undo(self) -> None:
        """Leave the blocks as they were."""
        for block in self._blocks:
            block._compiled_call_impl = None  # what Module.compile sets; there is no public way back
