"""One scale for all ranks' tokens where ComfyUI takes it from what a layer is given: nvfp4 without input_scale."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .token_split import TokenSplit, running_split

_LAYOUT = "TensorCoreNVFP4Layout"
_LARGEST = 448.0 * 6.0
"""What the largest value becomes: the largest scale of a block of values, times the largest number of four bits."""
_CHOSEN = "experts"
"""Layers below modules of this name run for the tokens that chose them, maybe on one rank alone."""


def find_scales(network: nn.Module, split: TokenSplit) -> None:
    """Note whether layers of a network take their scale from what they are given, and whether ranks run the same."""
    split.layers_alike = not any(_CHOSEN in name.split(".") for name, _ in network.named_modules())
    split.scales_by_input = any(getattr(each, "_layout_cls", None) == _LAYOUT for each in network.parameters())


@contextmanager
def agreeing_on_scales() -> Iterator[None]:
    """Inside, layers of cut blocks scale by the largest value of all ranks' tokens."""
    import comfy.quant_ops

    layout = getattr(comfy.quant_ops, _LAYOUT)
    own, inherited = layout.quantize, "quantize" not in vars(layout)
    before = vars(layout).get("quantize")

    def quantize(cls: Any, tensor: torch.Tensor, scale: Any = None, **options: Any) -> Any:
        split = running_split()
        if scale is None and split is not None:
            scale = _agreed(tensor, split)
        return own(tensor, scale, **options)

    layout.quantize = classmethod(quantize)
    try:
        yield
    finally:
        if inherited:
            del layout.quantize
        else:
            layout.quantize = before


def _agreed(tensor: torch.Tensor, split: TokenSplit) -> torch.Tensor | None:
    """The scale by the largest value of all ranks; None: by this rank's own. Collective over the sequence group."""
    # Of unlike GPUs one may compute in another type, and asks for no scale.
    if not split.layers_alike or split.mesh.speeds is not None or split.mesh.sequence is None:
        return None
    largest = torch.amax(tensor.abs())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=split.mesh.sequence)
    return largest / _LARGEST
