"""Rewrites of what ComfyUI's own blocks do, with the operators that diffusers' blocks have.

In FLUX.1's single blocks one product makes query, key, value and the feed-forward layer, and GELU follows for a part of
it: two products of the same rows do no more, and the second applies GELU before it writes. Norms over heads and the
rotary embedding behind them become the kernel of rotary.py, which reads queries and keys once; what it gives lies token
by token, as attention gives it back.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from ..attention import rotary  # noqa: F401 - its operators
from .joined_parts import joined_parts

_ROTATION = ("comfy_kitchen.apply_rope", "comfy_kitchen.apply_rope.default")
"""(query, key, matrices): ComfyUI's, of tensors (batch, heads, tokens, head dim) and (batch or 1, 1, tokens, pairs, 2,
2), whose matrices are rotations."""
_NORM_AND_ROTATION = ("comfy_kitchen.rms_rope", "comfy_kitchen.rms_rope.default")
"""(query, key, matrices, weight of queries, weight of keys, epsilon): norms over the head dim before it, of tensors
(batch, tokens, heads, head dim) and matrices (batch or 1, tokens, 1, pairs, 2, 2)."""
_ROTATION_OF_ONE = ("comfy_kitchen.apply_rope1", "comfy_kitchen.apply_rope1.default")
"""The same of one tensor: queries first, then keys."""


def default_epsilon(dtype: torch.dtype) -> float:
    """What this torch adds in a norm that is told nothing: the least of the type, or that of the float32 in which it is
    computed."""
    small = torch.full((1, 2), 0.01, dtype=dtype)
    normed = F.rms_norm(small, (2,), None, None)
    return torch.finfo(torch.float32 if bool((normed > 0.9).all()) else dtype).eps


_EPSILON = {dtype: default_epsilon(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)}


def split_products(graph: fx.Graph) -> None:
    """Make a product for each part of one that is split, where GELU (tanh) is all that reads a part."""
    linears: list[Any] = [node for node in graph.nodes if node.target is torch._C._nn.linear and len(node.args) == 3]
    for linear in linears:
        (split, *others) = linear.users
        parts = _parts_of(split) if not others else None
        if parts is None or not any(_is_gelu(part) for part in parts):
            continue
        x, weight, bias = linear.args
        first = 0
        for part, size in zip(parts, split.args[1], strict=True):
            with graph.inserting_before(split):
                rows = [graph.call_function(torch.narrow, (each, 0, first, size)) for each in (weight, bias)]
                product = graph.call_function(torch._C._nn.linear, (x, *rows))
            _replace(part, product)
            first += size


def _parts_of(split: Any) -> list[Any] | None:
    """Parts of a split of the last dim into given sizes, each read."""
    if split.target is not torch.split or not isinstance(split.args[1], list | tuple):
        return None
    dim = split.kwargs.get("dim", split.args[2] if len(split.args) > 2 else 0)
    if dim not in (-1, _value(split.args[0]).dim() - 1) or not all(isinstance(size, int) for size in split.args[1]):
        return None
    found = {user.args[1]: user for user in split.users if user.target is operator.getitem}
    whole = len(found) == len(split.users) == len(split.args[1])
    return [found[index] for index in range(len(found))] if whole else None


def _is_gelu(part: Any) -> bool:
    users = list(part.users)
    return len(users) == 1 and users[0].target is torch._C._nn.gelu and users[0].kwargs.get("approximate") == "tanh"


def rewrite_host_rotations(graph: fx.Graph) -> None:
    """Make one operator of norms and rotation of queries and keys."""
    called: list[Any] = [node for node in graph.nodes if node.op == "call_function"]
    for node in called:
        if str(node.target) in _NORM_AND_ROTATION and all(user.target is operator.getitem for user in node.users):
            turned = _as_ours(graph, node)
            for user in list(node.users) if turned else ():
                _replace(user, turned[user.args[1]])
        if str(node.target) in _ROTATION and all(user.target is operator.getitem for user in node.users):
            turned = _rotate(graph, node, *node.args)
            for user in list(node.users) if turned else ():
                _replace(user, turned[user.args[1]])
    alone = [node for node in called if str(node.target) in _ROTATION_OF_ONE]
    if len(alone) == 2 and alone[0].args[1] is alone[1].args[1]:
        query, key = alone
        if all(user > key for user in query.users):  # or it would come before what it reads
            turned = _rotate(graph, key, query.args[0], key.args[0], key.args[1])
            for node, made in zip(alone, turned, strict=False):
                _replace(node, made)


def _rotate(graph: fx.Graph, before: fx.Node, query: Any, key: Any, matrices: Any) -> list[fx.Node]:
    """The operator, of tensors that are all made before a node; [] where norms and shapes are not its own."""
    if _value(query).dim() != 4 or _value(matrices).dim() != 6 or _value(matrices).shape[1] != 1:
        return []
    if _value(query).shape[3] != 2 * _value(matrices).shape[3]:
        return []
    normed = [_normed_parts(each) for each in (query, key)]
    epsilons = {eps for parts in normed for _, _, eps in parts}
    if not normed[0] or len(normed[0]) != len(normed[1]) or len(epsilons) != 1:
        return []
    with graph.inserting_before(before):
        angles = [_angles(graph, matrices, row) for row in range(2)]
        given = [[graph.call_method("transpose", (_as_made(x), 1, 2)) for x, _, _ in parts] for parts in normed]
        weights = [[weight for _, weight, _ in parts] for parts in normed]
        both = graph.call_function(
            torch.ops.parallel_dit.norm_rotate.default, (*given, *weights, epsilons.pop(), *angles)
        )
        outputs = [graph.call_function(operator.getitem, (both, index)) for index in range(2)]
        return [graph.call_method("transpose", (output, 1, 2)) for output in outputs]


def _as_ours(graph: fx.Graph, node: Any) -> list[fx.Node]:
    """Our operator for ComfyUI's of the same; [] where shapes are not its own."""
    if len(node.args) != 6 or node.kwargs:
        return []
    query, key, matrices, *weights, eps = node.args
    if not isinstance(eps, float) or not all(isinstance(each, fx.Node) for each in weights):
        return []
    if _value(query).dim() != 4 or _value(matrices).dim() != 6 or _value(matrices).shape[2] != 1:
        return []
    if _value(query).shape[3] != 2 * _value(matrices).shape[3] or _value(weights[0]).dim() != 1:
        return []
    with graph.inserting_before(node):
        angles = [_angles(graph, matrices, row, heads=2) for row in range(2)]
        both = graph.call_function(
            torch.ops.parallel_dit.norm_rotate.default,
            ([query], [key], *([weight] for weight in weights), eps, *angles),
        )
        return [graph.call_function(operator.getitem, (both, index)) for index in range(2)]


def _as_made(x: Any) -> fx.Node:
    """A tensor as it was before it was copied to lie in order."""
    copied = x.op == "call_method" and x.target == "contiguous" and len(x.args) == 1 and isinstance(x.args[0], fx.Node)
    return x.args[0] if copied else x


def _angles(graph: fx.Graph, matrices: fx.Node, row: int, heads: int = 1) -> fx.Node:
    """Cosines (row 0) or sines of rotation matrices, (batch or 1, tokens, pairs): as they lie there, nothing is copied.

    Args:
        heads: dim of the matrices for heads, 1 or 2; the other one is that of tokens.
    """
    every = slice(None)
    place = (0, every) if heads == 1 else (every, 0)
    return graph.call_function(operator.getitem, (matrices, (every, *place, every, row, 0)))


def _normed_parts(x: Any) -> list[tuple[fx.Node, fx.Node, float]]:
    """Input, weight and eps of the norms whose outputs, joined along the tokens, are x; [] where it is not so."""
    parts = joined_parts(x, dim=2)
    norms = [norm for norm in map(_norm, parts) if norm is not None]
    return norms if len(norms) == len(parts) else []


def _norm(node: Any) -> tuple[fx.Node, fx.Node, float] | None:
    """Input, weight and eps of an RMSNorm over the head dim that nothing else reads."""
    if not isinstance(node, fx.Node):
        return None
    cast = node.op == "call_method" and node.target in ("to", "type_as") and len(node.args) == 2 and not node.kwargs
    if cast and len(node.users) == 1 and isinstance(node.args[0], fx.Node):
        if _value(node).dtype != _value(node.args[0]).dtype:
            return None
        node = node.args[0]
    if node.target not in (torch.rms_norm, F.rms_norm) or len(node.users) != 1:
        return None
    names = ("input", "normalized_shape", "weight", "eps")
    given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    x, shape, weight, eps = (given.get(name) for name in names)
    if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node) or not isinstance(shape, tuple | list):
        return None
    if len(shape) != 1 or _value(x).dim() != 4 or _value(x).dtype not in _EPSILON:
        return None
    return x, weight, _EPSILON[_value(x).dtype] if eps is None else eps


def _value(node: Any) -> Any:
    return node.meta["example_value"]


def _replace(old: fx.Node, new: fx.Node) -> None:
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)
