"""Attention kernels of packages that need not be there: FlashAttention 3 and SageAttention.

Each is one operator to torch.compile, which then need not look into the package.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

import torch
from torch import Tensor

from .operators import operator, shapes_of

PACKAGES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "flash3": ("flash_attn_interface", "FlashAttention 3 (folder hopper of github.com/Dao-AILab/flash-attention)"),
        "sage": ("sageattention", "SageAttention (github.com/thu-ml/SageAttention)"),
    }
)
"""Kernel -> module that is imported, and what to install."""


def is_missing(kernel: str) -> bool:
    """Whether it needs a package that is not there."""
    return kernel in PACKAGES and importlib.util.find_spec(PACKAGES[kernel][0]) is None


@cache
def _flash3_must_be_asked() -> bool:
    """Whether this version returns the log-sum-exp only where asked; the first ones always did."""
    import flash_attn_interface

    return "return_attn_probs" in inspect.signature(flash_attn_interface.flash_attn_func).parameters


@operator("flash3", "(Tensor query, Tensor key, Tensor value, float? scale) -> (Tensor, Tensor)")
def flash3(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """FlashAttention 3 (arXiv 2407.08608), with the log-sum-exp. Tensors as in kernels.py."""
    from flash_attn_interface import flash_attn_func

    asked = {"return_attn_probs": True} if _flash3_must_be_asked() else {}
    attended, lse, *_ = flash_attn_func(query, key, value, softmax_scale=scale, causal=False, **asked)
    return attended, lse


@operator("sage", "(Tensor query, Tensor key, Tensor value, float? scale) -> Tensor")
def sage(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """SageAttention (arXiv 2411.10958): 8-bit logits. Tensors as in kernels.py."""
    from sageattention import sageattn

    return sageattn(query, key, value, tensor_layout="NHD", is_causal=False, sm_scale=scale)


@operator("sage_with_lse", "(Tensor query, Tensor key, Tensor value, float? scale) -> (Tensor, Tensor)")
def sage_with_lse(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """The same, with the log-sum-exp."""
    from sageattention import sageattn

    attended, lse = sageattn(query, key, value, tensor_layout="NHD", is_causal=False, sm_scale=scale, return_lse=True)
    return attended, lse.contiguous()


@shapes_of(sage)
def _(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    return query.new_empty(query.shape)


@shapes_of(flash3)
@shapes_of(sage_with_lse)
def _(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, _ = query.shape
    return query.new_empty(query.shape), query.new_empty((batch, heads, tokens), dtype=torch.float32)
