"""Makes a network that ComfyUI has loaded one whose ranks share out its tokens, and whose blocks can be compiled."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...errors import UnsupportedModelError
from ...replaced import replaced
from ..attention_operator import through_operator
from ..cut_blocks import SPLIT_NO_TOKENS, cut_blocks
from ..gguf_layers import use_gguf_kernels
from ..quantised_layers import hide_quantised
from ..tables.blocks import Network
from ..token_split import TokenSplit, running_split

_NAMES = ("optimized_attention", "optimized_attention_masked")
_CHOOSER = "optimized_attention_for_device"
_MARK = "_asks_the_split"


def ask_the_split(modules: Iterable[str]) -> None:
    """Have these modules' attention go over the tokens of all ranks wherever a block runs that is cut, for good.
    UnsupportedModelError where a module calls its attention by no name that is known here."""
    for each in modules:
        module = importlib.import_module(each)
        names = [name for name in (*_NAMES, _CHOOSER) if name in vars(module)]
        if not names:
            what = "{each} of this ComfyUI has no {names}, through which its tokens could be split."
            raise UnsupportedModelError(what, SPLIT_NO_TOKENS, each=each, names=" or ".join(_NAMES))
        for name in names:
            function = vars(module)[name]
            if not hasattr(function, _MARK):
                asks = (_choosing if name == _CHOOSER else _asking)(function)
                setattr(asks, _MARK, True)
                setattr(module, name, asks)


def _asking(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def attend(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return through_operator(function, *args, **kwargs)
        split = running_split()
        if split is None or split.streams is None:
            return function(*args, **kwargs)
        if split.attention is None:  # over own tokens alone it would be another picture
            raise ValueError("no attention is set for the split that is running")
        return split.attention(function, *args, **kwargs)

    return attend


def _choosing(choose: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(choose)(lambda *args, **kwargs: _asking(choose(*args, **kwargs)))


_LAYOUT = "TensorCoreNVFP4Layout"
_LARGEST = 448.0 * 6.0  # what the largest value becomes: a block's largest scale times the largest number of four bits
_CHOSEN = "experts"  # layers below modules of this name run for the tokens that chose them, maybe on one rank alone


def find_scales(network: nn.Module, split: TokenSplit) -> None:
    """Note whether layers of a network take their scale from what they are given, and whether ranks run the same."""
    split.layers_alike = not any(_CHOSEN in name.split(".") for name, _ in network.named_modules())
    split.scales_by_input = any(getattr(each, "_layout_cls", None) == _LAYOUT for each in network.parameters())


@contextmanager
def agreeing_on_scales() -> Iterator[None]:
    """Inside, layers of cut blocks scale by the largest value of all ranks' tokens."""
    import comfy.quant_ops

    layout = getattr(comfy.quant_ops, _LAYOUT)
    own = layout.quantize

    def quantize(cls: Any, tensor: torch.Tensor, scale: Any = None, **options: Any) -> Any:
        split = running_split()
        if scale is None and split is not None:
            scale = _agreed(tensor, split)
        return own(tensor, scale, **options)

    with replaced(layout, "quantize", classmethod(quantize)):
        yield


def _agreed(tensor: torch.Tensor, split: TokenSplit) -> torch.Tensor | None:
    """The scale by the largest value of all ranks; None: by this rank's own. Collective over the sequence group."""
    # Of unlike GPUs one may compute in another type, and asks for no scale.
    if not split.layers_alike or split.mesh.speeds is not None or split.mesh.sequence is None:
        return None
    largest = torch.amax(tensor.abs())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=split.mesh.sequence)
    return largest / _LARGEST


def prepare_network(network: nn.Module, data: Network, split: TokenSplit) -> None:
    """Change the network so, once; `split` says which ranks. UnsupportedModelError where it is not as the data says."""
    ask_the_split(data.attention_in)
    hide_quantised(network)
    find_scales(network, split)
    use_gguf_kernels(network)
    cut_blocks(network, data.blocks, split)
