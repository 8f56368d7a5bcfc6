"""Rewrites of a block whose attention goes over peer memory: more of it joins that operator (peer_exchange.py)."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from .joined_parts import joined_parts

_SHAPES = ("flatten", "to", "contiguous")
"""Methods between attention and the layer after it that change no number and no order of tokens."""


def rewrite_peer_attention(graph: fx.Graph) -> None:
    """Rewrite `graph` in place, after norms and rotary embedding became one operator and GELU joined its product."""
    for node in [node for node in graph.nodes if node.target is torch.ops.parallel_dit.peer_attention.default]:
        _norm_while_sending(node)
    for node in [node for node in graph.nodes if node.target is torch.ops.parallel_dit.linear_of_parts.default]:
        _feed_forward_beside(graph, node)


def _norm_while_sending(attention: Any) -> None:
    """Let the kernel that sends queries and keys normalise and rotate them."""
    (query,), (key,), (value,), *rest = attention.args
    if not all(node.target is operator.getitem and len(node.users) == 1 for node in (query, key)):
        return
    rotated = query.args[0]
    if rotated.target is not torch.ops.parallel_dit.norm_rotate.default:
        return
    if (query.args[1], key.args[0], key.args[1]) != (0, rotated, 1):
        return
    queries, keys, query_weights, key_weights, eps, cos, sin = rotated.args
    values = joined_parts(value, dim=1)
    if len(values) != len(queries):
        return
    norms = [*query_weights, *key_weights, cos, sin]
    attention.args = (queries, keys, values, norms, eps, *rest[2:])


def _feed_forward_beside(graph: fx.Graph, linear: Any) -> None:
    """Let a block's feed-forward layer be computed while its attention's tensors travel."""
    parts, weight, bias = linear.args
    if len(parts) != 2 or any(len(part.users) != 1 for part in parts):
        return
    attention, hidden = _origin(parts[0]), parts[1]
    if attention is None or hidden.target is not torch.ops.parallel_dit.linear_gelu.default:
        return
    queries, keys, values, norms, eps, _, *memory = attention.args
    with graph.inserting_before(linear):
        beside = [*hidden.args, weight, bias]
        joined = graph.call_function(attention.target, (queries, keys, values, norms, eps, beside, *memory))
    joined.meta = dict(linear.meta)
    linear.replace_all_uses_with(joined)


def _origin(node: Any) -> Any:
    """The attention over peer memory whose output, and nothing else, a node is."""
    while node.op == "call_method" and node.target in _SHAPES and len(node.users) == 1:
        if node.target == "flatten" and node.args[1:] != (2, 3):
            return None
        node = node.args[0]
    only = node.target is torch.ops.parallel_dit.peer_attention.default and len(node.users) == 1 and not node.args[5]
    return node if only else None
