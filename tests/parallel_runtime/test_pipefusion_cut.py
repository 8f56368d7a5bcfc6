"""Where PipeFusion cuts: every block in one stage, every row in one patch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.flux_facts import FLUX_DEV
from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import ConfigurationError
from parallel_runtime.networks.facts import describe_request
from parallel_runtime.networks.latent_patches import cut_patches
from parallel_runtime.planning.cut import split_blocks
from parallel_runtime.planning.plan import choose
from parallel_runtime.planning.wish import Wish
from parallel_runtime.requests.facts import CPU


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(1, 6))
def test_no_split_of_the_blocks_has_a_shorter_longest_stage(costs, stages):
    assume(stages <= len(costs))  # no plan has more: test_plan.py

    def longest(start: int, left: int) -> float:
        """By trying everything."""
        if left == 1:
            return sum(costs[start:])
        cuts = range(start + 1, len(costs) - left + 2)
        return min(max(sum(costs[start:cut]), longest(cut, left - 1)) for cut in cuts)

    owned = split_blocks(costs, stages)
    assert [index for start, stop in owned for index in range(start, stop)] == list(range(len(costs)))
    assert all(start < stop for start, stop in owned)
    assert max(sum(costs[start:stop]) for start, stop in owned) == longest(0, stages)


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 2), st.integers(1, 9))
def test_patches_are_whole_token_rows_as_equal_as_can_be(height, width, patch_size, count):
    rows, columns = math.ceil(height / patch_size), math.ceil(width / patch_size)
    assume(count <= rows)  # no plan has more: test_plan.py
    patches = cut_patches((1, 4, height, width), patch_size, count)
    assert [row for patch in patches for row in range(*patch.rows)] == list(range(height))
    assert [token for patch in patches for token in range(*patch.tokens)] == list(range(rows * columns))
    sizes = [math.ceil((patch.rows[1] - patch.rows[0]) / patch_size) for patch in patches]
    assert max(sizes) - min(sizes) <= 1


def test_a_video_is_cut_through_frames_and_rows():
    patches = cut_patches((1, 16, 3, 4, 6), 2, 4)
    assert [patch.rows for patch in patches] == [(0, 4), (4, 8), (8, 10), (10, 12)]
    assert [stop - start for start, stop in (patch.tokens for patch in patches)] == [6, 6, 3, 3]


def test_of_a_video_whose_height_the_patch_size_does_not_divide_several_patches_are_refused_and_auto_takes_one():
    odd = describe_request([(3, 5, 6)], (2, 2), 8, batch=1, steps=20)
    wish = Wish(ParallelConfig(pipe=2, patches=2), 2, FLUX_DEV, odd, CPU)
    with pytest.raises(ConfigurationError, match="patches"):
        choose(wish)
    assert choose(replace(wish, config=ParallelConfig(pipe=2))).plan.patches == 1
