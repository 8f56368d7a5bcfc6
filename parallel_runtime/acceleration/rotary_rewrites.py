"""Rewrites of a traced block's rotary embedding: one operator for queries and keys, with the norms before it."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from ..attention import rotary  # noqa: F401 - its operators
from .joined_parts import joined_parts


def rewrite_rotations(graph: fx.Graph) -> None:
    """Rewrite `graph` in place."""
    for node in [node for node in graph.nodes if node.target is torch.empty_like]:
        _rotate_at_once(graph, node)
    casts: list[Any] = [node for node in graph.nodes if node.op == "call_method" and node.target == "type_as"]
    for cast in casts:
        if _dtype(cast.args[0]) == _dtype(cast.args[1]):
            cast.replace_all_uses_with(cast.args[0])
    drop_unused(graph)  # what was replaced would count as a user
    _rotate_together(graph)


def drop_unused(graph: fx.Graph) -> None:
    """Drop nodes that nothing reads, but for those that write into a tensor: older torch takes these for unused."""
    graph.eliminate_dead_code(lambda node: node.is_impure() or _writes(node))


def _writes(node: fx.Node) -> bool:
    return node.target is operator.setitem or (node.op == "call_method" and str(node.target).endswith("_"))


def _rotate_at_once(graph: fx.Graph, out: Any) -> None:
    """Make one operator of a rotation that writes even and odd numbers into an empty tensor, as diffusers' Wan does."""
    writes = {user.args[1][1].start: user for user in out.users if _writes_every_other(user)}
    casts = [user for user in out.users if user.target == "type_as"]
    if set(writes) != {0, 1} or len(casts) != 1 or len(out.users) != 3:
        return
    x = out.args[0]
    even, odd = writes[0].args[2], writes[1].args[2]
    if even.target is not operator.sub or odd.target is not operator.add:
        return
    products = [*even.args, *odd.args]
    if any(not isinstance(node, fx.Node) or node.target is not operator.mul for node in products):
        return
    (first, cos), (second, sin), (first_again, sin_again), (second_again, cos_again) = (n.args for n in products)
    if (first, second, cos, sin) != (first_again, second_again, cos_again, sin_again):
        return
    if not (_is_half(first, x, 0) and _is_half(second, x, 1)):
        return
    angles = [_every_other(cos, 0), _every_other(sin, 1)]
    if None in angles or any(_value(node).dim() != 4 or _value(node).shape[2] != 1 for node in angles):
        return
    # Each angle stands twice in a row: the even ones of the cosines and the odd ones of the sines are all there is.
    with graph.inserting_before(casts[0]):
        told = [_squeezed(graph, angle) for angle in angles]
        rotated = graph.call_function(torch.ops.parallel_dit.rotate.default, (x, *told))
    rotated.meta = dict(casts[0].meta)
    casts[0].replace_all_uses_with(rotated)
    for write in writes.values():  # no output, but not dead by itself either
        graph.erase_node(write)


def _squeezed(graph: fx.Graph, angle: fx.Node) -> fx.Node:
    """(batch or 1, tokens, 1, head dim) -> (batch or 1, tokens, head dim); the same node for the same angles."""
    made = [user for user in angle.users if user.target == "squeeze"]
    return made[0] if made else graph.call_method("squeeze", (angle, 2))


def _writes_every_other(node: Any) -> bool:
    if node.target is not operator.setitem or not isinstance(node.args[2], fx.Node):
        return False
    place = node.args[1]
    return isinstance(place, tuple) and len(place) == 2 and place[0] is Ellipsis and place[1] in _HALVES


_HALVES = [slice(0, None, 2), slice(1, None, 2)]


def _every_other(node: Any, start: int) -> Any:
    """The tensor of whose last dim a node is every other number from `start`."""
    if isinstance(node, fx.Node) and node.target is operator.getitem and node.args[1] == (Ellipsis, _HALVES[start]):
        return node.args[0]
    return None


def _is_half(node: Any, x: fx.Node, index: int) -> bool:
    """Whether a node is the first or the second number of every pair in x."""
    if not isinstance(node, fx.Node) or node.target is not operator.getitem or node.args[1] != index:
        return False
    unbound: Any = node.args[0]
    pairs: Any = unbound.args[0] if unbound.target == "unbind" and unbound.args[1:] == (-1,) else None
    return pairs is not None and pairs.target == "unflatten" and pairs.args == (x, -1, (-1, 2))


def _rotate_together(graph: fx.Graph) -> None:
    """Make one operator of the rotations of queries and keys, with the norms before them."""
    rotations = [node for node in graph.nodes if node.target is torch.ops.parallel_dit.rotate.default]
    normed = [(node, _normed_parts(node.args[0])) for node in rotations]
    if len(normed) != 2 or rotations[0].args[1:] != rotations[1].args[1:]:
        return
    (query, queries), (key, keys) = normed
    epsilons = {eps for _, _, eps in [*queries, *keys]}
    if not queries or len(queries) != len(keys) or len(epsilons) != 1:
        return
    with graph.inserting_before(key):
        both = graph.call_function(
            torch.ops.parallel_dit.norm_rotate.default,
            (
                *([given for given, _, _ in parts] for parts in (queries, keys)),
                *([weight for _, weight, _ in parts] for parts in (queries, keys)),
                epsilons.pop(),
                *query.args[1:],
            ),
        )
        outputs = [graph.call_function(operator.getitem, (both, index)) for index in range(2)]
    # Between the two rotations nothing may read the first, or it would come before what it reads.
    if all(user > both for user in query.users):
        _replace(query, outputs[0])
        _replace(key, outputs[1])


def _normed_parts(x: Any) -> list[tuple[fx.Node, fx.Node, float]]:
    """Return input, weight and eps of the norms whose outputs, joined along the tokens, are x; [] if it is not so."""
    parts = joined_parts(x, dim=1)
    norms = [norm for norm in map(_norm, parts) if norm is not None]
    return norms if len(norms) == len(parts) else []


def _norm(node: Any) -> tuple[fx.Node, fx.Node, float] | None:
    """Return input, weight and eps of an RMSNorm over the last dim that nothing else reads, or over the last two."""
    if node.target == "unflatten" and node.args[1] == 2 and len(node.users) == 1:  # normed before heads were told apart
        normed = _norm(node.args[0])
        if normed is None or _value(node.args[0]).dim() != 3:
            return None
        with node.graph.inserting_before(node):
            x = node.graph.call_method("unflatten", (normed[0], *node.args[1:]))
        x.meta = {}
        return x, *normed[1:]
    if node.target not in (torch.rms_norm, F.rms_norm) or len(node.users) != 1:
        return None
    given: dict[str, Any] = (
        dict(zip(("input", "normalized_shape", "weight", "eps"), node.args, strict=False)) | node.kwargs
    )
    x, shape, weight, eps = (given.get(name) for name in ("input", "normalized_shape", "weight", "eps"))
    if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node) or not isinstance(eps, float):
        return None
    return (x, weight, eps) if isinstance(shape, tuple | list) and len(shape) == 1 else None


def _value(node: Any) -> Any:
    return node.meta["example_value"]


def _dtype(node: Any) -> Any:
    """Of the tensor that a node is, a different one for every node that is none."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value.dtype if isinstance(value, torch.Tensor) else object()


def _replace(old: fx.Node, new: fx.Node) -> None:
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)
