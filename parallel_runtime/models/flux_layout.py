"""Black Forest Labs' key names that FLUX.1 and FLUX.2 share: what attends inside of their blocks."""

from __future__ import annotations

from collections.abc import Iterator

from .spec import WeightRule
from .weight_rules import fused

# ComfyUI saves its norms under the module's own parameter name.
KEY_SUFFIXES = {".query_norm.weight": ".query_norm.scale", ".key_norm.weight": ".key_norm.scale"}

_DOUBLE_FUSED = {
    "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
}
_DOUBLE_NORMS = {
    "attn.norm_q": "img_attn.norm.query_norm",
    "attn.norm_k": "img_attn.norm.key_norm",
    "attn.norm_added_q": "txt_attn.norm.query_norm",
    "attn.norm_added_k": "txt_attn.norm.key_norm",
}
_SINGLE_NORMS = {"attn.norm_q": "norm.query_norm", "attn.norm_k": "norm.key_norm"}


def double_attention(new: str, old: str, width: int, bias: bool) -> Iterator[WeightRule]:
    """Rules for projections and norms of a double block; `new` and `old` are what its names start with."""
    for source, targets in _DOUBLE_FUSED.items():
        yield from fused({new + target: width for target in targets}, old + source, bias=bias)
    yield from _norms(_DOUBLE_NORMS, new, old)


def single_norms(new: str, old: str) -> Iterator[WeightRule]:
    """Rules for the norms of a single block."""
    yield from _norms(_SINGLE_NORMS, new, old)


def _norms(names: dict[str, str], new: str, old: str) -> Iterator[WeightRule]:
    for target, source in names.items():
        yield WeightRule(f"{new}{target}.weight", f"{old}{source}.scale")
