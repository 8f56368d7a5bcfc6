"""A U-Net's forward with a place's channels side by side, as convolutions on GPUs want them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ...acceleration import channels_last
from ...acceleration.fused_functions import FusedFunctions
from ...replaced import replaced


class UnetFunctions(FusedFunctions):
    """Inside, what attention made of a picture's places stays as it lies, and gates are one pass over memory."""

    def __init__(self, gates: Sequence[nn.Module]):
        super().__init__(fused=True)
        self._known[torch.Tensor.contiguous] = self._contiguous
        self._gates = gates

    def _contiguous(self, function: Any, given: dict[str, Any]) -> torch.Tensor:
        x, made = given.pop("input"), None
        if not given and x.ndim == 4 and channels_last.takes(x):
            made = x if x.is_contiguous(memory_format=torch.channels_last) else None
        return made if made is not None else function(x, **given)

    @contextlib.contextmanager
    def gating(self) -> Iterator[None]:
        """Inside, gates are computed here, too."""
        with contextlib.ExitStack() as stack:
            for module in self._gates:
                stack.enter_context(replaced(module, "forward", partial(_gate, module, module.forward)))
            yield


@contextlib.contextmanager
def channels_side_by_side(gates: Sequence[nn.Module]) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Inside, a U-Net runs so, of which these are the `gates_of`; gives what arranges its latent."""
    functions = UnetFunctions(gates)
    with functions, functions.gating():
        yield functions.arranged


def gates_of(network: nn.Module) -> list[nn.Module]:
    """The modules of ComfyUI's that multiply one half of a product by GELU of the other."""
    return [module for module in network.modules() if type(module).__name__ == "GEGLU"]


def _gate(module: Any, plain: Any, x: torch.Tensor) -> torch.Tensor:
    return channels_last.gated(module.proj(x)) if channels_last.computes(x) else plain(x)
