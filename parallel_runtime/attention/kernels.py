"""Attention kernels by name: one table, one contract.

A kernel maps query, key and value of shape (batch, tokens, heads, head dim), an optional mask that broadcasts to
(batch, heads, query tokens, key tokens) and an optional scale to the attended value, shaped as the query.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import ConfigurationError

_PROBE_TOKENS = 77
"""Odd on purpose: a kernel that only takes multiples of 8 must not be chosen."""


class AttentionKernel(Protocol):
    """Attention over whole sequences, see the module."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Return attended values."""
        ...


def _sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale).transpose(1, 2)


def _only(backend: SDPBackend) -> AttentionKernel:
    def kernel(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        with sdpa_kernel(backend):
            return _sdpa(query, key, value, mask, scale)

    return kernel


KERNELS: Mapping[str, AttentionKernel] = MappingProxyType(
    {
        "sdpa": _sdpa,
        "cudnn": _only(SDPBackend.CUDNN_ATTENTION),
        "flash": _only(SDPBackend.FLASH_ATTENTION),
        "efficient": _only(SDPBackend.EFFICIENT_ATTENTION),
        "math": _only(SDPBackend.MATH),
    }
)


def resolve_kernel(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Return the KERNELS key that `name` stands for on this device.

    `auto` is cuDNN attention on Hopper and later in half precision (docs/performance.md: within a tenth of the best
    hand-written kernels, with nothing to install), and PyTorch's own choice elsewhere.

    Args:
        name: one of config.ATTENTION_BACKENDS.
        device, dtype, head_dim: what the model will call the kernel with.

    Raises:
        ConfigurationError: the named kernel cannot run here, found by running it on a few tokens.
    """
    if name == "auto":
        modern = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        if modern and dtype in (torch.bfloat16, torch.float16) and _refusal("cudnn", device, dtype, head_dim) is None:
            return "cudnn"
        return "sdpa"
    refusal = _refusal(name, device, dtype, head_dim)
    if refusal is not None:
        raise ConfigurationError(
            f"Attention backend {name!r} cannot run on {device.type} in {str(dtype).removeprefix('torch.')} "
            f"with head size {head_dim} ({refusal}).",
            "Set the attention backend to auto.",
        )
    return name


def _refusal(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why the kernel cannot run, in PyTorch's words, or None where it ran."""
    if name not in KERNELS:
        return f"known are {', '.join(KERNELS)}"
    query, key, value = torch.zeros(3, 1, _PROBE_TOKENS, 2, head_dim, device=device, dtype=dtype).unbind(0)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns once per kernel it passes over; the error says enough
            KERNELS[name](query, key, value)
    except RuntimeError as error:
        return str(error).splitlines()[0].rstrip(". ")
    return None
