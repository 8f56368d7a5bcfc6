"""What benchmarks/same_bits.py says of two calls."""

from __future__ import annotations

import torch

from benchmarks.same_bits import Trace, first_difference


def trace(*blocks: torch.Tensor) -> Trace:
    return Trace([("Block", each) for each in blocks], torch.ones(2))


def test_the_first_block_that_differs_is_told_in_steps_of_its_type():
    x = torch.tensor([1.0, -1.0, 0.0, 3.0], dtype=torch.bfloat16)
    other = x.clone()
    other[1] = torch.nextafter(other[1], torch.zeros((), dtype=torch.bfloat16))
    other[2] = -0.0  # not the same bits, and no step apart
    assert first_difference(trace(x, x), trace(x, x.clone())) is None
    found = first_difference(trace(x, x, x), trace(x, other, 2 * x))
    assert found is not None
    assert (found.place, found.name, found.part, found.steps) == (1, "Block", 0.25, 1)
    assert 0.001 < found.norm < 0.002
    result = first_difference(trace(x), Trace([("Block", x)], torch.tensor([1.0, -1.0])))
    assert result is not None
    assert (result.place, result.name) == (1, "the result")
    assert result.steps > 1 << 30
