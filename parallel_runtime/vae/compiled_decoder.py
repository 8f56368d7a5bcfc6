"""Blocks of a decoder that is a transformer (MiniMax H3's), compiled as those of a diffusion model are.

PyTorch's norms, gates and ComfyUI's rotation take a third of such a decoder's time by themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..acceleration.compiled_methods import CompiledMethods
from ..networks.compiled_blocks import QuantisedInside, is_plain
from ..networks.quantised_layers import hide_quantised
from ..replaced import replaced

_ROTATION = "apply_rope_split_half"


class CompiledDecoder:
    """Graphs of a decoder's blocks, which stay for the next picture."""

    def __init__(self, backend: str = "inductor"):
        self.methods = CompiledMethods(plain=True, backend=backend)
        self._inside = QuantisedInside()

    @contextlib.contextmanager
    def running(self, blocks: Iterable[nn.Module]) -> Iterator[None]:
        """Inside, these run compiled; one whose quantised layers no graph can hold runs as it is."""
        import comfy.quant_ops

        kitchen = comfy.quant_ops.ck
        with contextlib.ExitStack() as held:
            held.enter_context(self.methods.compiling())
            if hasattr(kitchen, _ROTATION):
                held.enter_context(replaced(kitchen, _ROTATION, rotate))
            for block in blocks:
                hide_quantised(block)
                if is_plain(block):
                    held.enter_context(replaced(block, "forward", partial(self._run, block, block.forward)))
            yield

    def _run(self, block: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        self._inside.look(block)
        return self.methods.call(forward, args, kwargs, _tokens, lambda: True)


def _tokens(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Any, int]]:
    return [(each, 1) for each in args]


def rotate(query: torch.Tensor, key: torch.Tensor, matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As comfy-kitchen's `apply_rope_split_half`, in which a graph sees no operator but plain sums, which join the norm
    before them. Queries and keys (batch, tokens, heads, 2 * pairs), matrices (batch, tokens, 1, pairs, 2, 2)."""
    cos, sin = matrices[..., 0, 0], matrices[..., 1, 0]

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)

    return turned(query), turned(key)
