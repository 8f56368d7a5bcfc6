"""FLUX.1-dev as plans see it, for tests and benchmarks of plans."""

from __future__ import annotations

from parallel_runtime.requests.facts import ModelFacts, RequestFacts

FLUX_DEV = ModelFacts(
    title="FLUX.1",
    heads=24,
    width=3072,
    parameters=11_901_408_320,
    block_sizes=(339_831_296,) * 19 + (141_591_808,) * 38,
    attentions=(1,) * 57,
    image_parameters=6_455_033_856,
    text_parameters=6_455_033_856,
    has_stages=True,
    shared_parameters=3_227_516_928,
    parallel_blocks=38,
)
"""A test compares it with the diffusers class."""


def flux_request(size: int, batch: int = 1) -> RequestFacts:
    """FLUX.1 at size × size pixels with 512 text tokens."""
    return RequestFacts((size // 16) ** 2, 512, batch, rows=size // 16)
