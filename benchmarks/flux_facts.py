"""FLUX.1-dev as plans see it, and its configuration in diffusers' names."""

from __future__ import annotations

from typing import Any

from parallel_runtime.requests.facts import ModelFacts, RequestFacts

FLUX_DEV = ModelFacts(
    title="FLUX.1",
    heads=24,
    width=3072,
    parameters=11_901_408_320,
    block_sizes=(339_831_296,) * 19 + (141_591_808,) * 38,
    attentions=(1,) * 57,
    image_parameters=6_456_507_648,
    text_parameters=6_456_507_648,
    has_stages=True,
    shared_parameters=3_228_567_552,
    parallel_blocks=38,
    projecting_blocks=57,
    head_dim=128,
)
"""A test compares it with the diffusers class."""

FLUX_CONFIG: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 64,
    "out_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": True,
    "axes_dims_rope": (16, 56, 56),
}


def flux_request(size: int, batch: int = 1) -> RequestFacts:
    """FLUX.1 at size × size pixels with 512 text tokens."""
    return RequestFacts((size // 16) ** 2, 512, batch, rows=size // 16)
