"""The pass over a traced block's rotary embedding: it becomes the operator of rotary.py, with the norms before it,
which reads queries and keys once. diffusers' blocks rotate by ours (rebind.py), ComfyUI's by those of comfy-kitchen."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from ..attention import rotary  # noqa: F401 - its operators
from .graph_nodes import drop_unused, joined_parts, replace, value_of

_OURS = "parallel_dit.rotate"
"""One tensor (batch, tokens, heads, head dim), cosines and sines: queries first, then keys."""
_ROTATION = "comfy_kitchen.apply_rope"
"""(query, key, matrices): ComfyUI's, of tensors (batch, heads, tokens, head dim) and (batch or 1, 1, tokens, pairs, 2,
2), whose matrices are rotations."""
_NORM_AND_ROTATION = "comfy_kitchen.rms_rope"
"""(query, key, matrices, weight of queries, weight of keys, epsilon): norms over the head dim before it, of tensors
(batch, tokens, heads, head dim) and matrices (batch or 1, tokens, 1, pairs, 2, 2)."""
_ROTATION_OF_ONE = "comfy_kitchen.apply_rope1"
"""As `_ROTATION`, of one tensor: queries first, then keys."""


def default_epsilon(dtype: torch.dtype) -> float:
    """What this torch adds in a norm that is told nothing: the least of the type, or that of the float32 in which it is
    computed."""
    small = torch.full((1, 2), 0.01, dtype=dtype)
    normed = F.rms_norm(small, (2,), None, None)
    return torch.finfo(torch.float32 if bool((normed > 0.9).all()) else dtype).eps


_EPSILON = {dtype: default_epsilon(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)}


def rewrite_rotations(graph: fx.Graph) -> None:
    """Rewrite `graph` in place."""
    casts: list[Any] = [node for node in graph.nodes if node.op == "call_method" and node.target == "type_as"]
    for cast in casts:
        values: list[Any] = [getattr(each, "meta", {}).get("example_value") for each in cast.args]
        if all(isinstance(each, torch.Tensor) for each in values) and values[0].dtype == values[1].dtype:
            cast.replace_all_uses_with(cast.args[0])
    drop_unused(graph)  # what was replaced would count as a user
    _of_two(graph, _OURS, _rotate_as_ours)
    for name, rotate in ((_ROTATION, _rotate), (_NORM_AND_ROTATION, _norm_and_rotate_as_ours)):
        for node in _called(graph, name):
            if all(user.target is operator.getitem for user in node.users):
                turned = rotate(graph, node, *node.args)
                for user in list(node.users) if turned else ():
                    replace(user, turned[user.args[1]])
    _of_two(graph, _ROTATION_OF_ONE, _rotate)


def _called(graph: fx.Graph, name: str) -> list[Any]:
    """Nodes that call the operator of this name."""
    called = (node for node in graph.nodes if node.op == "call_function")
    return [node for node in called if str(node.target) in (name, f"{name}.default")]


def _of_two(graph: fx.Graph, name: str, rotate: Callable[..., list[fx.Node]]) -> None:
    """Make one operator of two that rotate queries and keys alike."""
    found = _called(graph, name)
    if len(found) == 2 and found[0].args[1:] == found[1].args[1:]:
        query, key = found
        if all(user > key for user in query.users):  # or it would come before what it reads
            for node, made in zip(found, rotate(graph, key, query.args[0], *key.args), strict=False):
                replace(node, made)


def _rotate_as_ours(graph: fx.Graph, before: fx.Node, query: Any, key: Any, cos: Any, sin: Any) -> list[fx.Node]:
    """The operator, of tensors that are all made before a node; [] where norms are not its own."""
    normed = _norms_before(query, key, dim=1)
    if normed is None:
        return []
    with graph.inserting_before(before):
        return _norm_and_rotate(graph, *normed, (cos, sin))


def _rotate(graph: fx.Graph, before: fx.Node, query: Any, key: Any, matrices: Any) -> list[fx.Node]:
    """The same for ComfyUI's; [] also where shapes are not the operator's."""
    normed = _norms_before(query, key, dim=2) if _fit(query, matrices, heads=1) else None
    if normed is None:
        return []
    with graph.inserting_before(before):
        given = [[graph.call_method("transpose", (_as_made(x), 1, 2)) for x in parts] for parts in normed[0]]
        outputs = _norm_and_rotate(graph, given, *normed[1:], _angles(graph, matrices, heads=1))
        return [graph.call_method("transpose", (output, 1, 2)) for output in outputs]


def _norm_and_rotate_as_ours(graph: fx.Graph, node: Any, *given: Any) -> list[fx.Node]:
    """Our operator for ComfyUI's of the same; [] where shapes are not its own."""
    if len(given) != 6 or node.kwargs:
        return []
    query, key, matrices, *weights, eps = given
    if not isinstance(eps, float) or not all(isinstance(each, fx.Node) for each in weights):
        return []
    if not _fit(query, matrices, heads=2) or value_of(weights[0]).dim() != 1:
        return []
    with graph.inserting_before(node):
        parts = [[each] for each in (query, key, *weights)]
        return _norm_and_rotate(graph, parts[:2], parts[2:], eps, _angles(graph, matrices, heads=2))


def _fit(query: Any, matrices: Any, heads: int) -> bool:
    """Whether ComfyUI's matrices, whose dim for `heads` is one, are of each pair of numbers of a head."""
    x, turns = value_of(query), value_of(matrices)
    return x.dim() == 4 and turns.dim() == 6 and turns.shape[heads] == 1 and x.shape[3] == 2 * turns.shape[3]


def _norm_and_rotate(
    graph: fx.Graph, given: Sequence[list[Any]], weights: Sequence[list[Any]], eps: float, angles: Sequence[Any]
) -> list[fx.Node]:
    """Queries and keys, normed and rotated, of these parts and weights of both."""
    both = graph.call_function(torch.ops.parallel_dit.norm_rotate.default, (*given, *weights, eps, *angles))
    return [graph.call_function(operator.getitem, (both, index)) for index in range(2)]


def _as_made(x: Any) -> fx.Node:
    """A tensor as it was before it was copied to lie in order."""
    copied = x.op == "call_method" and x.target == "contiguous" and len(x.args) == 1 and isinstance(x.args[0], fx.Node)
    return x.args[0] if copied else x


def _angles(graph: fx.Graph, matrices: fx.Node, heads: int) -> list[fx.Node]:
    """Cosines and sines of rotation matrices, (batch or 1, tokens, pairs): as they lie there, nothing is copied.
    `heads` is the dim of the matrices for heads, 1 or 2; the other one is that of tokens."""
    every = slice(None)
    place = (0, every) if heads == 1 else (every, 0)
    return [graph.call_function(operator.getitem, (matrices, (every, *place, every, row, 0))) for row in range(2)]


def _norms_before(query: Any, key: Any, dim: int) -> tuple[list[list[Any]], list[list[Any]], float] | None:
    """Inputs and weights of the norms whose outputs, joined along `dim`, are queries and keys, of as many parts, and
    the one epsilon of all; None where it is not so."""
    queries, keys = ([_norm(part) for part in joined_parts(each, dim)] for each in (query, key))
    found = [norm for norm in (*queries, *keys) if norm is not None]
    if not queries or len(queries) != len(keys) or len(found) != 2 * len(keys) or len({eps for *_, eps in found}) != 1:
        return None
    inputs, weights, epsilons = zip(*found, strict=True)
    half = len(queries)
    return [[*inputs[:half]], [*inputs[half:]]], [[*weights[:half]], [*weights[half:]]], epsilons[0]


def _norm(node: Any) -> tuple[fx.Node, fx.Node, float] | None:
    """Input, weight and eps of an RMSNorm over the head dim that nothing else reads."""
    if not isinstance(node, fx.Node):
        return None
    cast = node.op == "call_method" and node.target in ("to", "type_as") and len(node.args) == 2 and not node.kwargs
    if cast and len(node.users) == 1 and isinstance(node.args[0], fx.Node):
        if value_of(node).dtype != value_of(node.args[0]).dtype:
            return None
        node = node.args[0]
    if node.target not in (torch.rms_norm, F.rms_norm) or len(node.users) != 1:
        return None
    names = ("input", "normalized_shape", "weight", "eps")
    given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    x, shape, weight, eps = (given.get(name) for name in names)
    if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node) or not isinstance(shape, tuple | list):
        return None
    if len(shape) != 1 or value_of(x).dim() != 4 or value_of(x).dtype not in _EPSILON:
        return None
    return x, weight, _EPSILON[value_of(x).dtype] if eps is None else eps
