"""The plan: what auto chooses, what it refuses, and what it tells the artist."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_runtime.config import ParallelConfig, ParallelPlan
from parallel_runtime.errors import ConfigurationError
from parallel_runtime.plan import explain, resolve_plan

AUTO = ParallelConfig()


@pytest.mark.parametrize(
    ("world_size", "heads", "batch", "plan"),
    [
        (1, 24, 4, ParallelPlan()),
        (2, 24, 1, ParallelPlan(ulysses=2)),
        (2, 24, 2, ParallelPlan(cfg=2)),
        (4, 24, 1, ParallelPlan(ulysses=4)),
        (4, 24, 2, ParallelPlan(cfg=2, ulysses=2)),
        (4, 24, 4, ParallelPlan(data=2, cfg=2)),
        (8, 24, 4, ParallelPlan(data=2, cfg=2, ulysses=2)),
        (4, 24, 3, ParallelPlan(data=3)),
        (5, 24, 1, ParallelPlan(ulysses=4)),
        (4, 3, 1, ParallelPlan(ulysses=3)),
        (2, 7, 1, ParallelPlan()),
        (4, 24, 6, ParallelPlan(data=3)),  # four ways would not be faster: two rows each, and some with one
    ],
)
def test_auto_deals_the_batch_first_and_gives_ulysses_what_divides_the_heads(world_size, heads, batch, plan):
    assert resolve_plan(AUTO, world_size, heads, batch) == plan


degrees = st.none() | st.integers(1, 8)
configs = st.builds(ParallelConfig, data=degrees, cfg=st.none() | st.integers(1, 2), ulysses=degrees)


@given(config=configs, world_size=st.integers(1, 16), heads=st.integers(1, 48), batch=st.integers(1, 9))
def test_a_plan_fits_the_ranks_keeps_what_is_set_and_leaves_no_faster_batch_split(config, world_size, heads, batch):
    given = {axis: getattr(config, axis) for axis in ("data", "cfg", "ulysses") if getattr(config, axis)}
    too_many = math.prod(given.values()) > world_size
    odd_heads = bool(config.ulysses and heads % config.ulysses)
    if too_many or odd_heads:
        with pytest.raises(ConfigurationError):
            resolve_plan(config, world_size, heads, batch)
        return
    plan = resolve_plan(config, world_size, heads, batch)
    assert plan.world_size <= world_size
    assert heads % plan.ulysses == 0
    assert {axis: getattr(plan, axis) for axis in given} == given
    if not config.data and not config.cfg:
        ways = world_size // (config.ulysses or 1)
        assert math.ceil(batch / plan.batch) == min(math.ceil(batch / way) for way in range(1, ways + 1))
        assert plan.batch <= batch
    if not config.ulysses:
        room = world_size // plan.batch
        assert plan.ulysses == max(degree for degree in range(1, room + 1) if heads % degree == 0)
    assert explain(plan, config, world_size, heads, batch)


def test_too_many_ranks_are_refused_with_both_numbers():
    with pytest.raises(ConfigurationError, match=r"ulysses 4.*need 8 ranks, and 4 ranks are there.*auto"):
        resolve_plan(ParallelConfig(cfg=2, ulysses=4), 4, 24, 2)


def test_heads_that_ulysses_does_not_divide_are_refused_with_the_valid_degrees():
    with pytest.raises(ConfigurationError, match=r"ulysses is 5.*24 attention heads.*one of 1, 2, 3, 4, 6, 8\."):
        resolve_plan(ParallelConfig(ulysses=5), 8, 24, 1)


def test_degrees_that_are_set_stay_where_the_batch_does_not_fill_them():
    config = ParallelConfig(cfg=2)
    plan = resolve_plan(config, 2, 24, 1)
    assert plan == ParallelPlan(cfg=2)
    assert "fills 1 of the 2 ways" in explain(plan, config, 2, 24, 1)


def test_set_data_leaves_cfg_to_the_batch_that_remains():
    assert resolve_plan(ParallelConfig(data=2), 4, 24, 4) == ParallelPlan(data=2, cfg=2)
    assert resolve_plan(ParallelConfig(data=2), 4, 24, 2) == ParallelPlan(data=2, ulysses=2)
    assert resolve_plan(ParallelConfig(cfg=1), 4, 24, 4) == ParallelPlan(data=4)


@pytest.mark.parametrize(
    ("world_size", "heads", "batch", "words"),
    [
        (4, 24, 1, ("ulysses 4", "6 of 24 heads each")),
        (4, 24, 2, ("cfg 2", "ulysses 2", "split 2 ways, 1 each", "12 of 24")),
        (4, 7, 1, ("3 of 4 ranks are not used", "from 2 to 4 divides", "7 heads")),
        (5, 24, 1, ("1 of 5 ranks is not used", "from 5 to 5 divides")),
        (4, 24, 6, ("1 of 4 ranks is not used", "would not make it faster")),
        (2, 24, 3, ("cfg 2", "1 or 2 each")),
    ],
)
def test_explain_names_the_degrees_and_why_ranks_are_idle(world_size, heads, batch, words):
    text = explain(resolve_plan(AUTO, world_size, heads, batch), AUTO, world_size, heads, batch)
    assert all(word in text for word in words), text
