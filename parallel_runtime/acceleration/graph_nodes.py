"""What passes ask of a traced block's nodes, and do with them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

_WRITING = {operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv}


def value_of(node: Any) -> Any:
    """The tensor that a node stood for when the block was traced, without its numbers."""
    return node.meta["example_value"]


def replace(old: fx.Node, new: fx.Node) -> None:
    """Have all that reads one node read another."""
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)


def joined_parts(x: Any, *dims: int) -> list[fx.Node]:
    """The tensors whose concatenation along one of these dims x is, where nothing else reads it; else x alone."""
    if x.target is torch.cat and len(x.users) == 1:
        parts, *given = x.args or (x.kwargs["tensors"],)
        if (*given, x.kwargs.get("dim", 0))[0] in dims:
            return list(parts)
    return [x]


def drop_unused(graph: fx.Graph) -> None:
    """Drop nodes that nothing reads, but for those that write into a tensor: older torch takes these for unused."""

    graph.eliminate_dead_code(lambda node: writes(node) or node.is_impure())


def writes(node: fx.Node) -> bool:
    """Whether a node writes into a tensor."""
    return node.target in _WRITING or (node.op == "call_method" and str(node.target).endswith("_"))
