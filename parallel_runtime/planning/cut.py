"""Which blocks are in which stage, and what their keys and values take. Pure; every rank computes the same numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from ..requests.facts import ModelFacts

_FOR_BLOCKS = 0.8  # part of a rank's memory that its blocks may take

Assignment = tuple[tuple[int, int], ...]  # blocks of each stage, (start, stop)
_Cut = tuple[float, float, tuple[int, ...]]  # cost of the longest stage, how uneven the stages are, where each starts


@lru_cache(maxsize=256)  # planning asks for the same few assignments again and again
def assign_blocks(sizes: tuple[float, ...], stages: int, most: float = math.inf) -> Assignment:
    """Assign blocks to stages by time, as far as that leaves no stage with more than `most` parameters, else so that
    the largest stage is as small as can be; sizes are those of each block, in forward order. Blocks of a family take
    equally long for the same tokens, so that stages get equally many; FLUX.1's first ones are larger all the same."""
    by_time = split_blocks([1.0] * len(sizes), stages, sizes, most)
    fits = max(sum(sizes[slice(*owned)]) for owned in by_time) <= most
    return by_time if fits else split_blocks(sizes, stages)


def most_parameters(memory_bytes: int, bytes_per_parameter: int) -> float:
    """Parameters that the blocks of a stage may have; the rest of the smallest rank's memory (0: not known) is for
    activations, keys and values."""
    return _FOR_BLOCKS * (memory_bytes or math.inf) / bytes_per_parameter


def split_blocks(
    costs: Sequence[float], stages: int, sizes: Sequence[float] | None = None, most: float = math.inf
) -> Assignment:
    """Assign consecutive blocks to stages, of which none is empty, so that the longest stage is as short as can be;
    costs, in any unit, and sizes are those of each block, in forward order. Assignments in which the blocks of a stage
    are larger than `most` come last."""
    assert 1 <= stages <= len(costs)  # others are refused before (wish.py)
    sums, filled = [0.0, *accumulate(costs)], [0.0, *accumulate(sizes or costs)]

    def cost(start: int, stop: int) -> float:
        if sizes is not None and filled[stop] - filled[start] > most:
            return math.inf
        return sums[stop] - sums[start]

    nothing: _Cut = (0.0, 0.0, ())
    # For the first blocks up to `stop`.
    best = {stop: _add_stage(nothing, 0, cost(0, stop)) for stop in range(1, len(costs) + 1)}
    for stage in range(1, stages):
        best = {
            stop: min(_add_stage(best[start], start, cost(start, stop)) for start in range(stage, stop))
            for stop in range(stage + 1, len(costs) + 1)
        }
    starts = best[len(costs)][2]
    return tuple(zip(starts, (*starts[1:], len(costs)), strict=True))


def _add_stage(before: _Cut, start: int, cost: float) -> _Cut:
    worst, uneven, starts = before
    return max(worst, cost), uneven + cost**2, (*starts, start)


def kept_bytes(model: ModelFacts, owned: tuple[int, int], tokens: float) -> int:
    """Bytes of keys and values that each rank of a stage, with the blocks (start, stop), keeps over a run; `tokens` are
    those of all rows that it computes."""
    return int(2 * tokens * sum(model.attentions[slice(*owned)]) * model.width * model.bytes_per_number)
