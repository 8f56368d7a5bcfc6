"""Attention kernels by name: query, key and value (batch, tokens, heads, head dim), maybe a mask and a scale ->
attended values, shaped as the query; where keys come in parts (over_ranks.py), each query's log-sum-exp besides.

A mask broadcasts to (batch, heads, query tokens, key tokens), and is as PyTorch's: boolean, False hides a key; or added
to the logit. Kernels that take none leave such calls to PyTorch's. Packages of kernels need not be there."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Attend = Callable[[Tensor, Tensor, Tensor, "Tensor | None", "float | None"], Tensor]  # query, key, value, mask, scale
WithLse = tuple[Tensor, Tensor]
"""Attended values, and the log (base e) of each query's sum of exponentials, (batch, heads, query tokens) float32."""
AttendWithLse = Callable[[Tensor, Tensor, Tensor, "Tensor | None", "float | None"], WithLse]

_Attended = TypeVar("_Attended")
_HALF = (torch.bfloat16, torch.float16)
PACKAGES: Mapping[str, tuple[str, str]] = {
    "flash3": ("flash_attn_interface", "FlashAttention 3 (folder hopper of github.com/Dao-AILab/flash-attention)"),
    "sage": ("sageattention", "SageAttention (github.com/thu-ml/SageAttention)"),
}
"""Kernel -> module that is imported, and what to install."""


@dataclass(frozen=True)
class AttentionKernel:
    """Attention over all keys at once, the fast way, and over some of them, None where it tells no log-sum-exp."""

    name: str
    attend: Attend
    attend_with_lse: AttendWithLse | None = None


def is_missing(kernel: str) -> bool:
    """Whether it needs a package that is not there."""
    return kernel in PACKAGES and importlib.util.find_spec(PACKAGES[kernel][0]) is None


def additive_mask(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return the mask as numbers to add, (batch, heads, query tokens, key tokens); tensors are (batch, heads, ...).
    Hidden keys get half of the lowest number and not -inf: where all keys of a part are hidden, the kernels give NaN or
    a log-sum-exp of 0 for -inf. So they weigh exactly 0 beside any key that is seen, in this part or another."""
    lowest = torch.finfo(query.dtype).min / 2
    if mask.dtype == torch.bool:
        bias = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, lowest)
    else:
        bias = mask.to(query.dtype).clamp(min=lowest)
    keys = key.shape[2]
    if query.is_cuda:  # rows must begin at multiples of 16 bytes
        bias = F.pad(bias.expand(*bias.shape[:-1], keys), (0, -keys % 16))[..., :keys]
    return bias.expand(*query.shape[:3], keys)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale).transpose(1, 2)


def _only(backend: SDPBackend) -> Attend:
    """Return PyTorch's attention by that backend; with a mask, which it may not take, by the next best that does."""
    masked = [backend, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        with sdpa_kernel(backend if mask is None else masked, set_priority=mask is not None):
            return _sdpa(query, key, value, mask, scale)

    return attend


def _with_lse(operator: AttendWithLse) -> AttendWithLse:
    """Of an operator that takes tensors of (batch, heads, tokens, head dim) and a mask that `additive_mask` made."""

    def attend_with_lse(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> WithLse:
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        bias = None if mask is None else additive_mask(mask, query, key)
        attended, lse = operator(query, key, value, bias, scale)
        return attended.transpose(1, 2), lse.float()

    return attend_with_lse


def _flash_lse(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float | None) -> WithLse:
    if not query.is_cuda:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(query, key, value, attn_mask=bias, scale=scale)
    if bias is not None:
        return _efficient_lse(query, key, value, bias, scale)
    attended, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, scale=scale)
    return attended, lse


def _efficient_lse(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float | None) -> WithLse:
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    attended, lse, *_ = efficient(query, key, value, bias, True, scale=scale)
    return attended, lse[..., : query.shape[2]]  # padded to a multiple of 32


def _cudnn_lse(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float | None) -> WithLse:
    if query.dtype not in _HALF:  # called by itself the operator does not refuse: it gives what lies in memory
        raise RuntimeError(f"cuDNN's attention takes bfloat16 and float16, not {query.dtype}")
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
    attended, lse, *_ = cudnn(query, key, value, bias, True, scale=scale)
    return attended, lse.reshape(query.shape[:3])  # some versions of PyTorch have one more dim, of one


def _math_lse(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float | None) -> WithLse:
    wide = torch.promote_types(query.dtype, torch.float32)
    logits = (query.to(wide) * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.to(wide).transpose(-1, -2)
    if bias is not None:
        logits = logits + bias
    return (logits.softmax(dim=-1) @ value.to(wide)).to(query.dtype), logits.logsumexp(dim=-1)


def _sdpa_lse(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float | None) -> WithLse:
    fast = _flash_lse if not query.is_cuda or query.dtype in _HALF else _efficient_lse
    return fast(query, key, value, bias, scale)


def _unmasked(attend: Callable[..., _Attended], masked: Callable[..., _Attended]) -> Callable[..., _Attended]:
    """Of (query, key, value, scale) -> what `masked` gives; with a mask that one."""
    return lambda query, key, value, mask, scale: (
        attend(query, key, value, scale) if mask is None else masked(query, key, value, mask, scale)
    )


@cache
def _flash3_must_be_asked() -> bool:
    """Whether this version returns the log-sum-exp only where asked; the first ones always did."""
    import flash_attn_interface

    return "return_attn_probs" in inspect.signature(flash_attn_interface.flash_attn_func).parameters


def _flash3(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> WithLse:
    """FlashAttention 3 (arXiv 2407.08608)."""
    from flash_attn_interface import flash_attn_func

    asked = {"return_attn_probs": True} if _flash3_must_be_asked() else {}
    attended, lse, *_ = flash_attn_func(query, key, value, softmax_scale=scale, causal=False, **asked)
    return attended, lse


def _sage(query: Tensor, key: Tensor, value: Tensor, scale: float | None, **asked: bool) -> Any:
    """SageAttention (arXiv 2411.10958): 8-bit logits."""
    from sageattention import sageattn

    return sageattn(query, key, value, tensor_layout="NHD", is_causal=False, sm_scale=scale, **asked)


def _sage_lse(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> WithLse:
    attended, lse = _sage(query, key, value, scale, return_lse=True)
    return attended, lse.contiguous()


_ALL = (
    AttentionKernel("sdpa", _sdpa, _with_lse(_sdpa_lse)),
    AttentionKernel("cudnn", _only(SDPBackend.CUDNN_ATTENTION), _with_lse(_cudnn_lse)),
    AttentionKernel("flash", _only(SDPBackend.FLASH_ATTENTION), _with_lse(_flash_lse)),
    AttentionKernel("efficient", _only(SDPBackend.EFFICIENT_ATTENTION), _with_lse(_efficient_lse)),
    AttentionKernel("math", _only(SDPBackend.MATH), _with_lse(_math_lse)),
    AttentionKernel(
        "flash3", _unmasked(lambda *given: _flash3(*given)[0], _sdpa), _unmasked(_flash3, _with_lse(_sdpa_lse))
    ),
    AttentionKernel("sage", _unmasked(_sage, _sdpa), _unmasked(_sage_lse, _with_lse(_sdpa_lse))),
)
KERNELS: Mapping[str, AttentionKernel] = {kernel.name: kernel for kernel in _ALL}
