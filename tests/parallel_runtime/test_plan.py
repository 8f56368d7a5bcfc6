"""The plan: what auto chooses, what it refuses, and what it tells the artist."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.flux_facts import FLUX_DEV, flux_request
from parallel_runtime.config import AXES, ParallelConfig, ParallelPlan
from parallel_runtime.errors import ConfigurationError
from parallel_runtime.planning.cost import PlannedStep
from parallel_runtime.planning.explanation import explain
from parallel_runtime.planning.plan import choose, plan_loading
from parallel_runtime.planning.wish import TYPICAL, Wish, check_steps
from parallel_runtime.requests.facts import CPU, GIB, HOST_MEMORY, NVLINK, PCIE, MachineFacts, RequestFacts, known_gpu

AUTO = ParallelConfig()
FASTER = ParallelConfig(may_change_pixels=True)
H200 = known_gpu("NVIDIA H200", 130 * GIB, NVLINK)
WITHOUT_P2P = replace(H200, link=HOST_MEMORY)
SMALL = replace(known_gpu("NVIDIA GeForce RTX 4090", 22 * GIB, PCIE))
WHOLE = replace(FLUX_DEV, title="Whole", has_stages=False)
PICTURE = flux_request(1024)

degrees = st.none() | st.integers(1, 8)
configs = st.builds(
    ParallelConfig,
    data=degrees,
    cfg=st.none() | st.integers(1, 2),
    pipe=st.none() | st.integers(1, 64),
    ring=degrees,
    ulysses=st.none() | st.integers(1, 48),
    patches=st.none() | st.integers(1, 100),
    compile=st.booleans(),
    may_change_pixels=st.booleans(),
)
models = st.sampled_from([FLUX_DEV, WHOLE, replace(FLUX_DEV, heads=5, block_sizes=(10**8, 10**9, 10**8))])
requests = st.builds(
    lambda rows, columns, text, batch, in_pool: RequestFacts(rows * columns, text, batch, rows, 20, in_pool),
    rows=st.integers(1, 128),
    columns=st.integers(1, 128),
    text=st.integers(0, 600),
    batch=st.integers(1, 6),
    in_pool=st.booleans(),
)
machines = st.sampled_from([H200, WITHOUT_P2P, SMALL, CPU])
ranks = st.integers(1, 8)


@pytest.mark.parametrize(
    ("ranks", "size", "batch", "plan"),
    [
        (1, 1024, 4, ParallelPlan()),
        (2, 1024, 1, ParallelPlan(ulysses=2)),
        (2, 1024, 2, ParallelPlan(cfg=2)),
        (4, 512, 1, ParallelPlan(ulysses=4)),
        (4, 2048, 1, ParallelPlan(ulysses=4)),
        (4, 1024, 2, ParallelPlan(cfg=2, ulysses=2)),
        (4, 1024, 4, ParallelPlan(data=2, cfg=2)),
        (8, 1024, 4, ParallelPlan(data=2, cfg=2, ulysses=2)),
    ],
)
@pytest.mark.parametrize("machine", [H200, CPU], ids=["H200", "CPU"])
def test_auto_splits_the_batch_before_it_splits_a_picture(machine, ranks, size, batch, plan):
    assert choose(Wish(AUTO, ranks, FLUX_DEV, flux_request(size, batch), machine)).plan == plan


def test_gpus_that_do_not_make_it_faster_stay_out_and_the_text_says_so():
    slow = replace(H200, link=replace(HOST_MEMORY, all_to_all=0.5, latency=1e-3, peer=0.5))
    config = ParallelConfig(pipe=1)
    assert choose(Wish(config, 4, FLUX_DEV, PICTURE, slow)).plan == ParallelPlan()
    text = explain(Wish(config, 4, FLUX_DEV, PICTURE, slow))
    assert "3 of 4 devices are not used." in text


def test_more_ranks_than_heads_split_by_ring_as_well():
    few = replace(FLUX_DEV, heads=2)
    plan = choose(Wish(ParallelConfig(pipe=1), 4, few, flux_request(2048), H200)).plan
    assert plan == ParallelPlan(ring=2, ulysses=2)


def test_pipefusion_is_chosen_for_slow_links_in_the_pool_only():
    plan = choose(Wish(FASTER, 4, FLUX_DEV, PICTURE, WITHOUT_P2P)).plan
    assert (plan.pipe, plan.patches, plan.warmup_steps) == (4, 4, 1)
    assert "slow links" in explain(Wish(FASTER, 4, FLUX_DEV, PICTURE, WITHOUT_P2P))
    assert "changes the picture slightly" in explain(Wish(FASTER, 4, FLUX_DEV, PICTURE, WITHOUT_P2P))
    assert choose(Wish(FASTER, 4, FLUX_DEV, replace(PICTURE, in_pool=False), WITHOUT_P2P)).plan.pipe == 1
    assert choose(Wish(ParallelConfig(pipe=1), 4, FLUX_DEV, PICTURE, WITHOUT_P2P)).plan.pipe == 1
    assert choose(Wish(FASTER, 4, WHOLE, PICTURE, WITHOUT_P2P)).plan.pipe == 1
    assert (
        plan_loading(Wish(FASTER, 4, FLUX_DEV, TYPICAL, WITHOUT_P2P)).pipe == 1
    )  # every rank can also run the model whole


@pytest.mark.parametrize("size", [512, 1024, 2048])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_pipefusion_is_never_chosen_where_links_are_fast_and_memory_suffices(ranks, size):
    assert choose(Wish(FASTER, ranks, FLUX_DEV, flux_request(size), H200)).plan.pipe == 1


def test_pipefusion_is_chosen_where_a_gpu_cannot_hold_the_model_and_keeps_the_stages_that_were_loaded():
    loaded = plan_loading(Wish(FASTER, 4, FLUX_DEV, TYPICAL, SMALL))
    assert loaded.pipe > 1
    assert "too little memory" in explain(Wish(FASTER, 4, FLUX_DEV, PICTURE, SMALL))
    assert "because the whole model takes" in explain(Wish(FASTER, 4, FLUX_DEV, PICTURE, SMALL))
    for batch in (1, 2, 4):
        plan = choose(Wish(FASTER, 4, FLUX_DEV, flux_request(2048, batch), SMALL, loaded)).plan
        assert (plan.pipe, plan.sequence) == (loaded.pipe, loaded.sequence)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(ranks=ranks, data=st.data())
def test_auto_never_changes_pixels(ranks, data):
    model, request, machine = data.draw(models), data.draw(requests), data.draw(machines)
    loaded = plan_loading(Wish(AUTO, ranks, model, TYPICAL, machine))
    assume(loaded.pipe == 1 or request.most_patches(loaded.sequence) > 0)  # else it is refused
    plan = choose(Wish(AUTO, ranks, model, request, machine, loaded)).plan
    assert plan.patches == 1  # stages there may be, in turn
    assert plan.pipe == 1 or machine is SMALL


def test_a_larger_picture_than_memory_holds_does_not_ask_for_stages_that_were_not_loaded():
    tight = replace(H200, memory_bytes=int(24.8 * GIB))
    loaded = plan_loading(Wish(AUTO, 2, FLUX_DEV, TYPICAL, tight))
    assert loaded.pipe == 1
    assert choose(Wish(AUTO, 2, FLUX_DEV, flux_request(2048), tight)).plan.pipe > 1
    assert choose(Wish(AUTO, 2, FLUX_DEV, flux_request(2048), tight, loaded)).plan.pipe == 1


def test_patches_and_warm_up_are_those_of_the_configuration_or_as_many_as_stages():
    config = ParallelConfig(pipe=2, patches=6, warmup_steps=3)
    assert str(choose(Wish(config, 2, FLUX_DEV, PICTURE, H200)).plan) == "stages 2 (6 patches, 3 warm-up steps)"
    plan = choose(Wish(ParallelConfig(pipe=4), 4, FLUX_DEV, PICTURE, H200)).plan
    assert str(plan) == "stages 4 (4 patches, 1 warm-up step)"
    low = replace(PICTURE, tokens=96, rows=3)
    assert choose(Wish(ParallelConfig(pipe=4), 4, FLUX_DEV, low, H200)).plan.patches == 3


def test_a_small_picture_gets_fewer_patches_so_that_every_rank_of_a_stage_has_a_token_of_each():
    small = RequestFacts(tokens=4 * 3, text_tokens=8, rows=4)
    for group, patches in ((1, 4), (3, 4), (4, 2), (6, 2), (7, 1), (12, 1)):
        plan = choose(Wish(ParallelConfig(pipe=4, ulysses=group), 4 * group, FLUX_DEV, small, H200)).plan
        assert (plan.pipe, plan.ulysses, plan.patches) == (4, group, patches)
        assert small.tokens // small.rows * (small.rows // patches) >= group
    # Of degrees on auto none is taken that leaves a rank without a token.
    config = ParallelConfig(pipe=2, patches=4)
    assert choose(Wish(config, 16, FLUX_DEV, small, CPU)).plan.sequence <= 3


@pytest.mark.parametrize(
    ("config", "loaded", "says"),
    [
        ({"pipe": 2, "ulysses": 4, "patches": 3}, None, r"4 devices of a stage has a token\. .*from 1 to 2, or"),
        ({"pipe": 2, "ulysses": 7, "patches": 3}, None, r"Set patches to auto, or to a number 1, or"),
        ({"pipe": 2, "ulysses": 13}, None, r"12 tokens cannot .* over the 13 devices.*Make a larger picture"),
        ({"pipe": 2, "ulysses": 2, "ring": 8}, None, r"the 16 devices of a stage.*ulysses and ring to smaller"),
        ({}, ParallelPlan(pipe=2, ulysses=13), r"12 tokens cannot .* over the 13 devices of a stage"),
    ],
)
def test_a_picture_too_small_for_what_is_set_is_refused_with_what_is_valid(config, loaded, says):
    small = RequestFacts(tokens=4 * 3, text_tokens=8, rows=4)
    with pytest.raises(ConfigurationError, match=says):
        choose(Wish(ParallelConfig(**config), 32, FLUX_DEV, small, H200, loaded))


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_of_a_picture_with_fewer_tokens_than_ranks_auto_leaves_ranks_out_and_what_is_set_is_refused(tokens):
    tiny = RequestFacts(tokens=tokens, text_tokens=154)
    assert choose(Wish(AUTO, 4, FLUX_DEV, tiny, CPU)).plan.sequence == tokens
    with pytest.raises(ConfigurationError, match="cannot be shared out over 4 devices"):
        choose(Wish(ParallelConfig(ulysses=2, ring=2), 4, FLUX_DEV, tiny, CPU))


def test_ranks_that_one_picture_leaves_idle_hold_stages_for_a_batch():
    config = ParallelConfig(pipe=2, ring=1, ulysses=1)
    loaded = plan_loading(Wish(config, 5, FLUX_DEV, TYPICAL, H200))
    for batch in (1, 2, 3, 4):
        plan = choose(Wish(config, 5, FLUX_DEV, flux_request(1024, batch), H200, loaded)).plan
        assert plan.world_size <= loaded.world_size == 4
    assert plan_loading(Wish(replace(config, data=1), 8, FLUX_DEV, TYPICAL, H200)).batch == 2
    assert plan_loading(Wish(replace(config, data=1, cfg=1), 8, FLUX_DEV, TYPICAL, H200)).batch == 1


@settings(max_examples=150, deadline=None)
@given(config=configs, ranks=ranks, model=models, request=requests, machine=machines)
def test_a_plan_fits_the_ranks_and_keeps_what_is_set_or_is_refused_where_auto_is_not(
    config: ParallelConfig, ranks: int, model, request: RequestFacts, machine: MachineFacts
):
    try:
        plan = choose(Wish(config, ranks, model, request, machine)).plan
    except ConfigurationError:
        config = replace(config, **dict.fromkeys((*AXES, "patches")))
        plan = choose(Wish(config, ranks, model, request, machine)).plan
    assert plan.world_size <= ranks
    assert plan.ulysses <= model.heads
    assert plan.pipe <= model.blocks
    assert plan.pipe == 1 or request.rows // plan.patches * (request.tokens // request.rows) >= plan.sequence
    assert all(getattr(config, axis) in (None, getattr(plan, axis)) for axis in AXES)
    choose.cache_clear()
    assert choose(Wish(config, ranks, model, request, machine)).plan == plan
    assert explain(Wish(config, ranks, model, request, machine))


@settings(max_examples=100, deadline=None)
@given(ranks=ranks, model=models, request=requests, machine=machines, compiled=st.booleans())
def test_what_auto_chooses_is_never_predicted_slower_than_one_gpu(ranks, model, request, machine, compiled):
    choice = choose(Wish(replace(FASTER, compile=compiled), ranks, model, request, machine))
    alone = PlannedStep(ParallelPlan(), model, request, machine, compiled).cost()
    fits = not machine.memory_bytes or alone.bytes <= machine.memory_bytes
    assert not fits or choice.cost.seconds <= alone.seconds
    assert choice.plan.pipe == 1 or choice.reason in ("memory", "links")


@pytest.mark.parametrize(
    ("config", "model", "says"),
    [
        (
            {"cfg": 2, "ulysses": 4},
            FLUX_DEV,
            r"\(cfg 2 × ulysses 4\) needs 8 workers, and 4 are running\. Lower a degree",
        ),
        ({"ulysses": 25}, FLUX_DEV, r"ulysses is 25, and FLUX\.1 has 24 attention heads\. .*a number from 1 to 4\."),
        ({"pipe": 2}, WHOLE, r"Whole cannot be cut into stages\. Set stages to auto or 1\."),
        ({"pipe": 58}, FLUX_DEV, r"has 57 blocks, too few for 58 stages\. .*a number from 1 to 4\."),
        ({"pipe": 2, "patches": 65}, FLUX_DEV, r"64 token rows cannot be cut into 65 patches\. .*from 1 to 64"),
    ],
)
def test_what_cannot_be_is_refused_with_both_numbers_and_the_valid_choices(config, model, says):
    with pytest.raises(ConfigurationError, match=says):
        choose(Wish(ParallelConfig(**config), 4, model, PICTURE, H200))


@pytest.mark.parametrize("weights", ["dealt", "host"])
def test_weights_that_cannot_come_block_by_block_are_refused_when_it_is_planned(weights):
    whole = replace(FLUX_DEV, title="SDXL", why_whole="it convolves over the whole picture")
    with pytest.raises(ConfigurationError, match=rf"{weights}, and those of SDXL .* Set weights to whole"):
        choose(Wish(ParallelConfig(weights=weights), 1, whole, PICTURE, H200))


def test_a_warm_up_that_is_longer_than_the_run_is_refused_with_what_is_valid():
    plan = ParallelPlan(pipe=2, patches=2, warmup_steps=5)
    check_steps(plan, 5)
    check_steps(ParallelPlan(), 1)
    with pytest.raises(ConfigurationError, match=r"warm up for 5 steps, and the run has 4\. .*a number from 1 to 4"):
        check_steps(plan, 4)


def test_degrees_that_are_set_stay_where_the_batch_does_not_fill_them():
    config = ParallelConfig(cfg=2)
    assert choose(Wish(config, 2, FLUX_DEV, PICTURE, H200)).plan == ParallelPlan(cfg=2)
    assert "fills 1 of the 2 ways" in explain(Wish(config, 2, FLUX_DEV, PICTURE, H200))


def test_a_configuration_without_the_newer_fields_is_read_and_bad_values_are_refused():
    old = {"devices": "0,1", "data": None, "cfg": 2, "ulysses": 2, "attention": "auto", "compile": True, "version": 1}
    config = ParallelConfig.from_mapping(old)
    assert (config.pipe, config.ring, config.patches, config.warmup_steps) == (None, None, None, 1)
    assert ParallelConfig.from_mapping(config.to_mapping()) == config
    for wrong in ({"ring": 0}, {"pipe": True}, {"patches": 0}, {"warmup_steps": 0}):
        with pytest.raises(ConfigurationError, match="from 1"):
            ParallelConfig(**wrong)
