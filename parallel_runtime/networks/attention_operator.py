"""ComfyUI's attention call as one operator of a compiled block: a graph is the same whatever the mesh, the shares
and the kernel are, and ranks whose blocks run compiled exchange as those do whose blocks run as they are."""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ..attention.operators import operator, shapes_of
from ..attention.projections import LinearLayer, Projections
from ..attention.rotary import whole_heads
from ..exchange.layer_beside import LayerBeside
from ..replaced import replaced
from .float8_layers import Float8Layer
from .int8_layers import Int8Layer
from .quantised_layers import KINDS
from .traced import TRACED

FUNCTIONS = "comfy.ldm.modules.attention"  # module of ComfyUI's attention functions, called again by their names
_UNNAMED = {"transformer_options", "_inside_attn_wrapper"}  # arguments that are not about the attention itself

Parts = list[Tensor]  # as `attend_over_peers` gets them
Route = Callable[..., "Tensor | None"]
_NOW = threading.local()


@contextmanager
def attending(
    attention: Callable[..., Tensor], over_shared: Route | None = None, over_host: Route | None = None
) -> Iterator[None]:
    """Inside, in this thread, operators of compiled blocks attend so; see `BlockAttention.at` and what is named so."""
    ways = replaced(_NOW, "over_shared", over_shared), replaced(_NOW, "over_host", over_host)
    with replaced(_NOW, "attention", attention), ways[0], ways[1]:
        yield


@functools.cache
def in_order(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A block's forward (the class's function) whose exchanges keep their order in a graph, too."""

    @functools.wraps(forward)
    def run(block: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            return forward(block, *args, **kwargs)
        TRACED.in_order = True
        returned = forward(block, *args, **kwargs)
        TRACED.in_order, TRACED.last = False, None
        return returned

    return run


def attend_by_kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """What diffusers' processors call (attention/rebind.py): tensors are (batch, tokens, heads, head dim)."""
    heads = query.shape[2]
    q, k, v = (each.transpose(1, 2) for each in (query, key, value))
    if torch.compiler.is_compiling():
        attended = through_operator(the_kernel, q, k, v, heads, mask, skip_reshape=True, scale=scale)
    else:
        attended = _NOW.attention(the_kernel, "", q, k, v, heads, mask, skip_reshape=True, scale=scale)
    return attended.unflatten(2, (heads, -1))


def the_kernel(*args: Any, **kwargs: Any) -> Tensor:
    """Stands for the kernel that `BlockAttention` has, where a function of ComfyUI's would be named."""
    raise NotImplementedError


def through_operator(
    function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | None = None,
    attn_precision: torch.dtype | None = None, skip_reshape: bool = False, skip_output_reshape: bool = False,
    **kwargs: Any,
) -> Tensor:  # fmt: skip
    """The call of a block that is being traced. ValueError: the operator cannot carry it, the block is not compiled."""
    others = {name: value for name, value in kwargs.items() if name not in _UNNAMED and value is not None}
    scale, gqa = others.pop("scale", None), bool(others.pop("enable_gqa", False))
    low_precision = bool(others.pop("low_precision_attention", True))
    if others or (function.__module__ != FUNCTIONS and function is not the_kernel):
        raise ValueError("attention with arguments that are not known here")
    made: Tensor = torch.ops.parallel_dit.block_attention.default(
        q, k, v, heads, mask, function.__name__, TRACED.where, attn_precision, skip_reshape, skip_output_reshape,
        scale, gqa, low_precision, TRACED.last,
    )  # fmt: skip
    if TRACED.in_order:
        TRACED.last = made
    return made


@operator(
    "block_attention",
    "(Tensor q, Tensor k, Tensor v, int heads, Tensor? mask, str function, str where, ScalarType? precision,"
    " bool skip_reshape, bool skip_output_reshape, float? scale, bool gqa, bool low_precision, Tensor? after=None)"
    " -> Tensor",
)
def block_attention(
    q, k, v, heads, mask, function, where, precision, skip_reshape, skip_output_reshape, scale, gqa, low_precision,
    after=None,
):  # fmt: skip
    """What the thread's attention gives, token by token in memory, and no view of an argument; `after` goes before."""
    named = {"scale": scale} if scale is not None else {}
    if gqa:
        named["enable_gqa"] = True
    if not low_precision:
        named["low_precision_attention"] = False
    attend = the_kernel if function == the_kernel.__name__ else getattr(importlib.import_module(FUNCTIONS), function)
    made = _NOW.attention(
        getattr(attend, "__wrapped__", attend), where, q, k, v, heads, mask=mask, attn_precision=precision,
        skip_reshape=skip_reshape, skip_output_reshape=skip_output_reshape, **named,
    )  # fmt: skip
    made = made.transpose(1, 2).contiguous().transpose(1, 2) if skip_output_reshape else made.contiguous()
    return made.clone() if made.data_ptr() in {each.data_ptr() for each in (q, k, v)} else made


@shapes_of(block_attention)
def _(q, k, v, heads, mask, function, where, precision, skip_reshape, skip_output_reshape, *more):
    width = q.shape[2] // heads if q.ndim == 3 else q.shape[3]
    made = q.new_empty((q.shape[0], q.shape[2 if skip_reshape else 1], heads, width))
    return made.transpose(1, 2) if skip_output_reshape else made.flatten(2)


@operator(
    "block_attention_of_parts",
    "(Tensor[] queries, Tensor[] keys, Tensor[] values, Tensor[] norms, float eps, Tensor[] beside, int heads,"
    " str function, ScalarType? precision, float? scale, bool low_precision) -> Tensor",
)
def block_attention_of_parts(
    queries, keys, values, norms, eps, beside, heads, function, precision, scale, low_precision
):
    """The same with norms and rotary embedding before it, (batch, tokens, heads * head dim), and with what a block
    makes of it, (batch, tokens, width); arguments as of `attend_over_peers`. Made by acceleration/attention_pass.py."""
    if _NOW.over_shared and (made := _NOW.over_shared(queries, keys, values, norms, eps, beside, scale)) is not None:
        return made
    q, k, v = (each.transpose(1, 2) for each in whole_heads(queries, keys, values, norms, eps))
    attended = block_attention(q, k, v, heads, None, function, "", precision, True, False, scale, False, low_precision)
    if not beside:
        return attended
    layer = LayerBeside(beside)
    return torch.ops.parallel_dit.linear_of_parts.default([attended, layer.hidden()], layer.weight, layer.bias)


@shapes_of(block_attention_of_parts)
def _(queries, keys, values, norms, eps, beside, *more):
    batch, _, heads, head_dim = queries[0].shape
    return _made(queries[0], beside, batch, sum(part.shape[1] for part in queries), heads * head_dim)


def _made(like, beside, *shape):
    if beside:
        return beside[0].new_empty((*beside[0].shape[:-1], LayerBeside(beside).weight.shape[0]))
    return like.new_empty(shape)


@operator(
    "block_attention_of_layers",
    "(Tensor[] inputs, int[] fed, Tensor[] tensors, int[] counts, str[] kinds, int[] places, int heads, int head_dim,"
    " ScalarType dtype, Tensor[] norms, float eps, Tensor[] beside, str function, ScalarType? precision,"
    " float? scale, bool low_precision) -> Tensor",
)
def block_attention_of_layers(
    inputs, fed, tensors, counts, kinds, places, heads, head_dim, dtype, norms, eps, beside, function, precision, scale,
    low_precision,
):  # fmt: skip
    """The same with the layers that make queries, keys and values; see `Projections`. Of each layer `tensors` has so
    many: weight and maybe bias, or what a quantised layer of this kind consists of. Made by projection_pass.py."""
    left = iter(tensors)
    of_layers = [list(islice(left, count)) for count in counts]
    made_by = [_layer_of(kind, own, dtype) for kind, own in zip(kinds, of_layers, strict=True)]
    layers = Projections(inputs, fed, made_by, places, heads, head_dim, dtype)
    if _NOW.over_host and (made := _NOW.over_host(layers, norms, eps, beside, scale)) is not None:
        return made
    return block_attention_of_parts(
        *layers.whole(), norms, eps, beside, heads, function, precision, scale, low_precision
    )


def _layer_of(kind, tensors, dtype):
    if not kind:
        return LinearLayer(*tensors)
    return (Int8Layer if KINDS[kind].by_tokens else Float8Layer)(tensors, kind, dtype)


@shapes_of(block_attention_of_layers)
def _(inputs, fed, tensors, counts, kinds, places, heads, head_dim, dtype, norms, eps, beside, *more):
    layers = places[: len(places) // 3 : 2]  # of the queries of each part
    tokens, like = sum(inputs[fed[layer]].shape[1] for layer in layers), inputs[0].new_empty(0, dtype=dtype)
    return _made(like, beside, inputs[0].shape[0], tokens, heads * head_dim)
