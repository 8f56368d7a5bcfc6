"""The pass over the linear layers that make a block's queries, keys and values: they join attention's operator, which
may send what they take instead of heads (exchange/host_gather.py)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import fx

from .attention_pass import OF_PARTS
from .graph_nodes import replace, value_of, writes

_VIEWS = {"chunk", "flatten", "getitem", "movedim", "permute", "reshape", "split", "squeeze", "transpose", "unbind"}
_VIEWS |= {"unflatten", "unsqueeze", "view"}
"""What gives a tensor over the numbers of its first argument, where nothing is copied."""


def rewrite_projections(graph: fx.Graph) -> None:
    """Rewrite `graph` in place, after norms became a part of attention's operator."""
    for node in [node for node in graph.nodes if str(node.target) == OF_PARTS]:
        _take_layers(graph, node)


def _take_layers(graph: fx.Graph, attention: Any) -> None:
    *kinds, norms, eps, beside, _, function, precision, scale, low_precision = attention.args
    parts = list(chain(*kinds))
    heads, head_dim = _value(parts[0]).shape[2:]
    found = [_made_by(part, heads, head_dim) for part in parts]
    made = [each for each in found if each is not None]
    if len(made) < len(parts) or any(value_of(norm).numel() != head_dim for norm in norms[:-2]):  # norms over all heads
        return
    paths = [path for path, _ in made]
    if not _read_alone({node for path in paths for node in path}, attention):
        return
    layers = list(dict.fromkeys(path[-1] for path in paths))
    inputs, tensors, types = zip(*map(_layer, layers), strict=True)
    given = [_first_alike(inputs, x) for x in inputs]
    dtypes = {value_of(each).dtype for each in layers}
    rounded = [x for x in inputs if _rounded(x)[0] is not x]
    if len(dtypes) > 1 or _written_between(graph, [*layers, *rounded], attention):
        return
    different = list(dict.fromkeys(given))
    fed, counts = [different.index(x) for x in given], [len(own) for own in tensors]
    places = list(chain(*((layers.index(path[-1]), first) for path, first in made)))
    arguments = (different, fed, [*chain(*tensors)], counts, list(types), places, heads, head_dim, *dtypes)
    arguments = (*arguments, norms, eps, beside)
    with graph.inserting_before(attention):
        target = torch.ops.parallel_dit.block_attention_of_layers.default
        joined = graph.call_function(target, (*arguments, function, precision, scale, low_precision))
    replace(attention, joined)


def _made_by(part: Any, heads: Any, head_dim: Any) -> tuple[list[Any], int] | None:
    """The way from a part (batch, tokens, heads, head dim) back to the linear layer of whose output it is a view, heads
    side by side; and the column at which it begins."""
    path = [part]
    while not _makes_rows(path[-1]):
        name = getattr(path[-1].target, "__name__", path[-1].target)
        if path[-1].op == "placeholder" or name not in _VIEWS or not isinstance(path[-1].args[0], fx.Node):
            return None
        path.append(path[-1].args[0])
    view, output = _value(part), value_of(path[-1])
    alike = view.dim() == 4 and tuple(view.shape[2:]) == (heads, head_dim) and output.dim() == 3
    alike = alike and view.shape[:2] == output.shape[:2] and view.dtype == output.dtype
    if not alike or view.untyped_storage()._cdata != output.untyped_storage()._cdata:
        return None
    rows_alike = view.shape[0] == 1 or view.stride(0) == output.stride(0)
    if not rows_alike or view.stride()[1:] != (output.stride(1), head_dim, 1):
        return None
    first = path[-1].args[-2] if path[-1].target in _some_rows() else 0
    return path, first + int(view.storage_offset() - output.storage_offset())


def _value(node: Any) -> Any:
    """As `value_of`, also of heads and tokens in the other order, which passes have put there; all else has one."""
    return value_of(node) if "example_value" in node.meta else _value(node.args[0]).transpose(*node.args[1:])


def _read_alone(nodes: set[Any], attention: Any) -> bool:
    """Whether nothing else reads them: it would need the layer's output."""
    return all(user in nodes or user is attention for node in nodes for user in node.users)


def _written_between(graph: fx.Graph, made: list[Any], attention: Any) -> bool:
    """Whether anything is written from the first of these to attention, where all are read then."""
    order = list(graph.nodes)
    between = order[min(map(order.index, made)) : order.index(attention)]
    return any(writes(node) for node in between)


def _makes_rows(node: Any) -> bool:
    """Whether it is a linear layer that gives of other ranks' tokens what it gives of these: one of plain weights, of
    float8 whose input is rounded before it, or of int8."""
    ours = torch.ops.parallel_dit
    return node.target in (torch._C._nn.linear, ours.float8_layer.default, ours.int8_layer.default, *_some_rows())


def _some_rows() -> tuple[Any, ...]:
    """Operators of some rows of a layer, whose last arguments are the first one and how many."""
    return torch.ops.parallel_dit.float8_rows.default, torch.ops.parallel_dit.int8_rows.default


def _layer(node: Any) -> tuple[Any, list[Any], str]:
    """Input, tensors of the layer, and its kind, "" of a linear one."""
    if node.target is not torch._C._nn.linear:
        return node.args[0], list(node.args[1]), node.args[2]
    given = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
    bias = given.get("bias")
    return given["input"], [given["weight"]] if bias is None else [given["weight"], bias], ""


def _first_alike(inputs: Sequence[Any], x: Any) -> Any:
    """The first of the layers' inputs that rounds the same as this one: each float8 layer has its own."""
    return next(each for each in inputs if _rounded(each) == _rounded(x))


def _rounded(x: Any) -> tuple[Any, ...]:
    """What is rounded, and how."""
    how: list[Any] = []
    while x.op == "call_method" and x.target in ("to", "clamp"):
        how.append((x.target, x.args[1:], x.kwargs))
        x = x.args[0]
    return x, *how
