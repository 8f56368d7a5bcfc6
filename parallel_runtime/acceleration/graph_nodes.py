"""What passes ask of a traced block's nodes, and do with them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

_WRITING = {operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv}
_WRITING |= {operator.imod, operator.ipow, operator.iand, operator.ior, operator.ixor}


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
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    if node.op == "call_method":
        return str(target).endswith("_")
    told = "out" in node.kwargs or bool(node.kwargs.get("inplace"))
    functional = getattr(target, "__module__", "") == "torch.nn.functional"  # whose `inplace` may be given by its place
    in_place = functional and any(each is True for each in node.args[1:])
    named = str(getattr(target, "__name__", "")).endswith("_")
    return node.op == "call_function" and (target in _WRITING or told or in_place or named)
