"""Norm and rotary embedding of queries and keys as one kernel, three times as fast as what torch.compile makes of
them, and rounded alike: float32 inside, the model's dtype after the norm and at the end (docs/performance.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .operators import operator, shapes_of

Tensors = list[Tensor]


@operator(
    "norm_rotate",
    "(Tensor[] queries, Tensor[] keys, Tensor[] query_weights, Tensor[] key_weights, float eps, Tensor cos,"
    " Tensor sin) -> (Tensor, Tensor)",
)
def norm_rotate(
    queries: Tensors, keys: Tensors, query_weights: Tensors, key_weights: Tensors, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Normalise each part (RMSNorm), such as text and image, join them along the tokens, rotate neighbouring pairs.
    Queries and keys are (batch, tokens, heads, head dim), keys of maybe fewer heads; weights for each part (head dim,),
    or (heads x head dim,) of norms over all heads; cos and sin ([batch or 1,] tokens of all parts, head dim) float32,
    each value twice, or (..., head dim / 2), each once, of any strides."""
    if _has_kernel(queries[0]):
        from .rotary_kernel import launch

        return launch(queries, keys, query_weights, key_weights, eps, cos, sin)
    query = norm_rotate_one(queries, query_weights, eps, cos, sin)
    return query, norm_rotate_one(keys, key_weights, eps, cos, sin)


def norm_rotate_one(parts: Tensors, weights: Tensors, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """`norm_rotate` of queries or keys alone."""
    head_dim = parts[0].shape[-1]
    if _has_kernel(parts[0]):
        from .rotary_kernel import launch_one

        return launch_one(parts, weights, eps, cos, sin)
    cos, sin = (each.repeat_interleave(head_dim // each.shape[-1], -1) for each in (cos, sin))
    return rotate(torch.cat([_norm(x, w, eps) for x, w in zip(parts, weights, strict=True)], 1), cos, sin)


def apply_norms(queries: Tensors, keys: Tensors, norms: Tensors, eps: float) -> tuple[Tensor, Tensor]:
    """`norm_rotate` by a list of all that it needs: weights of the queries' parts, those of the keys', cos and sin."""
    *weights, cos, sin = norms
    halves = weights[: len(queries)], weights[len(queries) :]
    return torch.ops.parallel_dit.norm_rotate.default(queries, keys, *halves, eps, cos, sin)


def whole_heads(queries: Tensors, keys: Tensors, values: Tensors, norms: Tensors, eps: float) -> tuple[Tensor, ...]:
    """Queries, keys and values of all parts' tokens, norms and rotation applied."""
    return (*apply_norms(queries, keys, norms, eps), values[0] if len(values) == 1 else torch.cat(values, 1))


def _has_kernel(part: Tensor) -> bool:
    return part.device.type == "cuda" and part.shape[-1] & (part.shape[-1] - 1) == 0


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    across = x if weight.numel() == x.shape[-1] else x.flatten(2)
    return F.rms_norm(across, weight.shape, weight, eps).view(x.shape)


@shapes_of(norm_rotate)
def _(queries: Tensors, keys: Tensors, *more: Any) -> tuple[Tensor, Tensor]:
    batch, _, _, head_dim = queries[0].shape
    tokens = sum(part.shape[1] for part in queries)
    made = [parts[0].new_empty((batch, tokens, parts[0].shape[2], head_dim)) for parts in (queries, keys)]
    return made[0], made[1]


@operator("rotate", "(Tensor x, Tensor cos, Tensor sin) -> Tensor")
def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring pairs of the last dim of x, (batch, tokens, heads, head dim), in float32. An operator, so
    that a pass finds two of them in a traced block and makes one `norm_rotate` of them."""
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((-second, first), dim=-1).flatten(-2)
    return (x.float() * cos.unsqueeze(-2) + rotated * sin.unsqueeze(-2)).to(x.dtype)


@shapes_of(rotate)
def _(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def rotate_by_operator(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a stand-in for diffusers.models.embeddings.apply_rotary_emb; rotary_pass.py adds the norm to it."""

    def apply_rotary_emb(
        x: Tensor, freqs_cis: Any, use_real: bool = True, use_real_unbind_dim: int = -1, sequence_dim: int = 2
    ) -> Any:
        if use_real and use_real_unbind_dim == -1 and sequence_dim == 1:
            cos, sin = freqs_cis
            return torch.ops.parallel_dit.rotate.default(x, cos, sin)
        return original(x, freqs_cis, use_real, use_real_unbind_dim, sequence_dim)

    return apply_rotary_emb
