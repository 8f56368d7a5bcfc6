"""The pass over a block's attention call: norms before it and the layer beside it join its operator, which gets what
there is, and decides when it runs: the graph does not know of the exchange (networks/attention_operator.py)."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from .graph_nodes import joined_parts, replace

_ATTENTION = "parallel_dit.block_attention.default"
OF_PARTS = "parallel_dit.block_attention_of_parts.default"
_SHAPES = ("unflatten", "flatten", "to", "contiguous")
"""Methods between attention and the layer after it that change no number and no order of tokens."""
_BESIDE = 5
"""Place of `beside` in the operator's arguments."""


def rewrite_attention(graph: fx.Graph) -> None:
    """Rewrite `graph` in place, after norms and rotary embedding became one operator and GELU joined its product."""
    _drop_single_copies(graph)
    for node in [node for node in graph.nodes if str(node.target) == _ATTENTION]:
        _take_norms(graph, node)
    for node in [node for node in graph.nodes if node.target is torch.ops.parallel_dit.linear_of_parts.default]:
        _feed_forward_beside(graph, node)


def _drop_single_copies(graph: fx.Graph) -> None:
    """Take away repetitions that repeat nothing: heads of keys that serve one head of queries each (Lumina)."""
    for node in [node for node in graph.nodes if node.op == "call_method" and node.target == "repeat"]:
        x, *times = node.args
        value = x.meta.get("example_value")
        if value is not None and all(time == 1 for time in times) and len(times) == value.dim():
            node.replace_all_uses_with(x)


def _take_norms(graph: fx.Graph, attention: Any) -> None:
    query, key, value, heads, mask, function, where, precision, *rest = attention.args
    heads_first, heads_first_after, scale, repeats_keys, low_precision, *after = rest
    # One that comes `after` another waits for it, which the operator of parts does not.
    if mask is not None or where or not heads_first or heads_first_after or repeats_keys or any(after):
        return
    made = [_tokens_first(each) for each in (query, key)]
    if any(each is None or each.target is not operator.getitem for each in made):
        return
    rotated = made[0].args[0]
    norms = rotated.target is torch.ops.parallel_dit.norm_rotate.default
    if not norms or [each.args for each in made] != [(rotated, 0), (rotated, 1)]:
        return
    queries, keys, query_weights, key_weights, eps, cos, sin = rotated.args
    with graph.inserting_before(attention):
        if (tokens := _tokens_first(value)) is not None:
            values = joined_parts(tokens, 1)
        else:
            parts = joined_parts(value, 2)
            values = [_tokens_first(part) or graph.call_method("transpose", (part, 1, 2)) for part in parts]
        if len(values) != len(queries):
            return
        weights = [*query_weights, *key_weights, cos, sin]
        given: Any = (queries, keys, values, weights, eps, [], heads, function, precision, scale, low_precision)
        joined = graph.call_function(torch.ops.parallel_dit.block_attention_of_parts.default, given)
    replace(attention, joined)


def _tokens_first(x: Any) -> Any:
    """What a node (batch, heads, tokens, head dim) is a view of, whose tokens come before its heads, behind copies and
    dims that come and go; None where it is none."""
    if x.op != "call_method" or x.target not in ("transpose", "movedim") or x.args[1:] not in ((1, 2), (2, 1)):
        return None
    x = x.args[0]
    while x.op == "call_method" and x.target == "flatten" and x.args[1:] == (2, 3):
        inner = x.args[0]
        if inner.op != "call_method" or inner.target != "unsqueeze" or inner.args[1:] != (3,):
            break
        x = inner.args[0]
    return x


def _feed_forward_beside(graph: fx.Graph, linear: Any) -> None:
    parts, weight, bias = linear.args
    if len(parts) != 2 or any(len(part.users) != 1 for part in parts):
        return
    attention, hidden = _origin(parts[0]), parts[1]
    if str(attention.target) != OF_PARTS or attention.args[_BESIDE]:
        return
    ours = torch.ops.parallel_dit
    if hidden.target is not (ours.linear_silu_gate if bias is None else ours.linear_gelu).default:
        return
    given = list(attention.args)
    given[_BESIDE] = [*hidden.args, weight] if bias is None else [*hidden.args, weight, bias]
    with graph.inserting_before(linear):
        joined = graph.call_function(attention.target, tuple(given))
    replace(linear, joined)


def _origin(node: Any) -> Any:
    """What a node (batch, tokens, width) is a copy or a view of, as far as nothing else reads it."""
    while node.op == "call_method" and node.target in _SHAPES and len(node.args[0].users) == 1:
        joined, divided = node.target == "flatten", node.target == "unflatten"
        if (joined and node.args[1:] != (2, 3)) or (divided and node.args[1] != 2):
            break
        node = node.args[0]
    return node
