"""Where `auto` has weights: whole where that fits or might, else dealt, host, or stages; and what an artist reads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.flux_facts import FLUX_DEV
from parallel_runtime.config import ParallelConfig
from parallel_runtime.planning.coming_blocks import Coming, resident_blocks
from parallel_runtime.planning.explanation import explain
from parallel_runtime.planning.plan import choose
from parallel_runtime.planning.weights_choice import choose_weights, ways_out
from parallel_runtime.planning.wish import TYPICAL, Wish
from parallel_runtime.requests.facts import CPU, ETHERNET, GIB, HOST_MEMORY, NVLINK, PCIE, known_gpu

AUTO = ParallelConfig()
WEIGHTS = FLUX_DEV.parameters * FLUX_DEV.bytes_per_parameter
LARGE = known_gpu("NVIDIA H200", 130 * GIB, NVLINK)
SMALL = known_gpu("NVIDIA GeForce RTX 4090", 22 * GIB, PCIE)
MEASURED = replace(PCIE, measured=True)
APART = replace(SMALL, link=HOST_MEMORY)
WITHOUT_STAGES = replace(FLUX_DEV, has_stages=False)
ONE_BLOCK = replace(WITHOUT_STAGES, block_sizes=(FLUX_DEV.block_parameters,), attentions=(57,))


@pytest.mark.parametrize(
    ("config", "ranks", "model", "machine", "taken"),
    [
        (AUTO, 2, FLUX_DEV, LARGE, "whole"),
        (AUTO, 2, FLUX_DEV, CPU, "whole"),
        (AUTO, 2, FLUX_DEV, replace(SMALL, memory_bytes=0), "whole"),
        (AUTO, 2, FLUX_DEV, SMALL, "dealt"),
        (AUTO, 2, WITHOUT_STAGES, SMALL, "dealt"),
        (AUTO, 1, FLUX_DEV, SMALL, "host"),
        (AUTO, 2, FLUX_DEV, APART, "host"),
        (AUTO, 2, FLUX_DEV, replace(SMALL, memory_bytes=11 * GIB), "host"),
        (AUTO, 2, FLUX_DEV, replace(APART, host_bytes=12 * GIB), "stages"),
        (AUTO, 2, FLUX_DEV, replace(SMALL, network=ETHERNET, ranks_per_host=1), "stages"),
        (AUTO, 2, ONE_BLOCK, SMALL, "whole"),
        (AUTO, 2, replace(WITHOUT_STAGES, why_whole="it convolves over the whole picture"), SMALL, "whole"),
        # It would do, or nearly.
        (AUTO, 2, WITHOUT_STAGES, replace(SMALL, memory_bytes=WEIGHTS + GIB // 4), "whole"),
        # Others hold the rest of a large GPU: what would be refused is not tried.
        (AUTO, 2, WITHOUT_STAGES, replace(LARGE, free_each=(WEIGHTS + GIB,)), "whole"),
        (AUTO, 2, WITHOUT_STAGES, replace(LARGE, free_each=(WEIGHTS + GIB // 4,)), "dealt"),
        (AUTO, 2, FLUX_DEV, replace(LARGE, free_each=(11 * GIB,)), "host"),
        # The host is faster, and both were measured.
        (AUTO, 2, FLUX_DEV, replace(SMALL, host_rate=54.0), "dealt"),
        (AUTO, 2, FLUX_DEV, replace(SMALL, host_rate=54.0, link=MEASURED), "host"),
        (AUTO, 2, FLUX_DEV, replace(SMALL, host_rate=8.0, link=MEASURED), "dealt"),
        (AUTO, 2, FLUX_DEV, replace(SMALL, host_rate=54.0, link=replace(NVLINK, measured=True)), "dealt"),
        (AUTO, 2, FLUX_DEV, replace(SMALL, free_each=(130 * GIB,)), "dealt"),
        (ParallelConfig(weights="whole"), 2, FLUX_DEV, SMALL, "stages"),
        (ParallelConfig(may_change_pixels=True), 2, FLUX_DEV, SMALL, "stages"),
        (ParallelConfig(pipe=2), 2, FLUX_DEV, SMALL, "stages"),
    ],
)
def test_the_first_that_fits_is_taken(config, ranks, model, machine, taken):
    weight_bytes = model.parameters * model.bytes_per_parameter
    chosen = choose_weights(Wish(config, ranks, model, TYPICAL, machine), weight_bytes)
    choice = choose(Wish(chosen, ranks, model, TYPICAL, machine))
    if taken in ("dealt", "host"):
        assert (chosen.weights, choice.plan.pipe) == (taken, 1)
        assert choice.cost.bytes <= machine.usable_bytes
    else:
        assert chosen is config
        assert (choice.plan.pipe > 1) == (taken == "stages")


@pytest.mark.parametrize(
    ("config", "memory", "stay"),
    [
        (AUTO, 22, 11),
        (AUTO, 15, 1),
        (AUTO, 11, 15),
        (ParallelConfig(weights="dealt"), 22, 1),
        (ParallelConfig(weights="host"), 22, 33),
        (ParallelConfig(weights="host"), 0, 1),
    ],
)
def test_as_many_blocks_stay_as_fit_or_the_first(config, memory, stay):
    machine = replace(SMALL, memory_bytes=memory * GIB)
    chosen = choose_weights(Wish(config, 2, FLUX_DEV, TYPICAL, machine), WEIGHTS)
    assert chosen.resident == stay
    held, more = (Coming(chosen.weights, 2, count).kept_bytes(FLUX_DEV) for count in (stay, stay + 1))
    assert choose(Wish(chosen, 2, FLUX_DEV, TYPICAL, machine)).cost.weight_bytes == held
    if memory and config.weights != "dealt":
        assert more > machine.memory_bytes * 2 / 3
    assert choose_weights(Wish(config, 2, replace(FLUX_DEV, block_sizes=()), TYPICAL, machine), WEIGHTS).resident == 0


def test_blocks_that_stay_lie_evenly_between_those_that_come_and_one_comes():
    assert resident_blocks(0, 5) == ()
    assert resident_blocks(1, 5) == (0,)
    assert resident_blocks(3, 7) == (0, 2, 4)
    assert resident_blocks(9, 4) == (0, 1, 2)
    assert resident_blocks(2, 1) == ()


LARGER, SMALLER = 31 * GIB, 15 * GIB
PAIR = replace(known_gpu("NVIDIA GeForce RTX 5090", 15 * GIB, HOST_MEMORY), free_each=(LARGER, SMALLER))
"""An RTX 5090 with an RTX 5060 Ti."""


def coming_of(config: ParallelConfig, ranks: int) -> Coming:
    coming = Coming.of(config, ranks)
    assert coming is not None
    return coming


def test_a_gpu_with_more_memory_keeps_more_blocks_and_the_one_with_the_least_what_it_kept():
    alike = choose_weights(Wish(AUTO, 2, FLUX_DEV, TYPICAL, replace(PAIR, free_each=(SMALLER, SMALLER))), WEIGHTS)
    assert (alike.weights, alike.held) == ("host", ())
    for frees in ((LARGER, SMALLER), (SMALLER, LARGER), (LARGER, SMALLER, 20 * GIB)):
        ranks = len(frees)
        chosen = choose_weights(Wish(AUTO, ranks, FLUX_DEV, TYPICAL, replace(PAIR, free_each=frees)), WEIGHTS)
        assert replace(chosen, held=()) == alike
        coming = coming_of(chosen, ranks)
        for free, held in zip(frees, chosen.held, strict=True):
            every = len(coming.sizes(FLUX_DEV))
            if free == SMALLER:
                assert held == 0
            elif free == LARGER:
                assert held == every  # all of the model
                assert coming.kept_bytes(FLUX_DEV, held) == WEIGHTS
            else:
                fuller = (coming.kept_bytes(FLUX_DEV, count) for count in (held, held + 1))
                assert next(fuller) <= free * 2 / 3 < next(fuller)


@pytest.mark.parametrize(
    ("config", "machine"),
    [
        (AUTO, replace(LARGE, free_each=(120 * GIB, 60 * GIB))),  # whole fits both
        (AUTO, replace(PAIR, free_each=())),
        (AUTO, replace(PAIR, free_each=(SMALLER + GIB, SMALLER))),  # nearly alike
        (ParallelConfig(weights="whole"), PAIR),
        (ParallelConfig(pipe=2), PAIR),
    ],
)
def test_no_gpu_keeps_more_where_that_is_not_needed_or_not_known(config, machine):
    assert choose_weights(Wish(config, 2, FLUX_DEV, TYPICAL, machine), WEIGHTS).held == ()


def test_one_that_has_all_weights_does_not_wait_for_another_that_copies_them():
    """16 GB over a slot take longer than the step of the GPU that holds all."""
    slow = replace(PAIR, host_rate=8.0, link=replace(HOST_MEMORY, route=8.0))
    chosen = choose_weights(Wish(AUTO, 2, FLUX_DEV, TYPICAL, slow), WEIGHTS)
    unlike, alike = (choose(Wish(config, 2, FLUX_DEV, TYPICAL, slow)) for config in (chosen, replace(chosen, held=())))
    assert unlike.plan.world_size == 1
    assert unlike.cost.seconds == unlike.cost.computing_seconds == unlike.alone.seconds
    assert alike.cost.seconds > 2 * unlike.cost.seconds
    # Where the smaller one comes first, both copy.
    turned = replace(chosen, held=chosen.held[::-1])
    assert choose(Wish(turned, 2, FLUX_DEV, TYPICAL, slow)).cost.seconds == alike.cost.seconds
    text = explain(Wish(chosen, 2, FLUX_DEV, TYPICAL, slow))
    assert f"GPUs with more memory keep more: 57, {chosen.resident} of 57 blocks, in the order of the devices." in text
    assert "keep more" not in explain(Wish(replace(chosen, held=()), 2, FLUX_DEV, TYPICAL, slow))


def test_where_copies_are_as_fast_as_blocks_both_compute():
    fast = replace(PAIR, host_rate=500.0, link=replace(NVLINK, measured=True))
    chosen = replace(ParallelConfig(weights="host"), resident=10, held=(47, 0))
    assert choose(Wish(chosen, 2, FLUX_DEV, TYPICAL, fast)).plan.ulysses == 2


def test_a_quantised_file_counts_by_its_bytes():
    half = replace(WITHOUT_STAGES, bytes_per_parameter=2)
    assert choose_weights(Wish(AUTO, 2, half, TYPICAL, SMALL), WEIGHTS * 3 // 4) is AUTO
    assert (
        choose_weights(Wish(AUTO, 2, half, TYPICAL, SMALL), WEIGHTS * 3).weights == "host"
    )  # a share of half is too large


def test_the_loader_says_what_was_taken_what_a_gpu_holds_and_what_it_costs():
    text = explain(Wish(choose_weights(Wish(AUTO, 2, FLUX_DEV, TYPICAL, SMALL), WEIGHTS), 2, FLUX_DEV, TYPICAL, SMALL))
    assert "Weights are spread over the GPUs, because the whole model does not fit a GPU's 22.0 GiB" in text
    assert (
        "holds 14.6 of 22.2 GiB, 11 of 57 blocks whole, and copies 8.8 GiB a step from the others (431 ms at about 22"
        in text
    )
    assert "GiB are left" in text
    assert "may not fit" not in text
    slow = replace(SMALL, link=replace(PCIE, peer=5.0, measured=True))
    dealt = ParallelConfig(weights="dealt")
    assert choose(Wish(dealt, 2, FLUX_DEV, TYPICAL, slow)).cost.seconds == Coming("dealt", 2).seconds(FLUX_DEV, slow)
    assert "at the measured 5 GB/s" in explain(Wish(dealt, 2, FLUX_DEV, TYPICAL, slow))


def test_the_hosts_link_counts_as_it_was_measured():
    host, fast = ParallelConfig(weights="host"), replace(LARGE, host_rate=54.0)
    assert "at about 22 GB/s" in explain(Wish(host, 2, FLUX_DEV, TYPICAL, LARGE))
    assert "at the measured 54 GB/s" in explain(Wish(host, 2, FLUX_DEV, TYPICAL, fast))
    both = [choose(Wish(host, 2, FLUX_DEV, TYPICAL, machine)).cost.seconds for machine in (LARGE, fast)]
    assert both[0] / both[1] == pytest.approx(54 / 22)


@pytest.mark.parametrize("weights", ["dealt", "host"])
@pytest.mark.parametrize("compile", ["on", "off"])
def test_however_slowly_weights_come_the_plan_is_that_of_whole_ones(weights, compile):
    """Over other ranks the picture would be another, and a GPU would wait for nothing."""
    slow = replace(LARGE, link=replace(NVLINK, peer=5.0, measured=True))
    whole, streamed = (ParallelConfig(weights=each, compile=compile) for each in ("whole", weights))
    cost = choose(Wish(streamed, 2, FLUX_DEV, TYPICAL, slow)).cost
    assert cost.seconds == Coming(weights, 2).seconds(FLUX_DEV, slow) > cost.computing_seconds
    assert (
        choose(Wish(streamed, 2, FLUX_DEV, TYPICAL, slow)).plan == choose(Wish(whole, 2, FLUX_DEV, TYPICAL, slow)).plan
    )
    assert choose(Wish(whole, 2, FLUX_DEV, TYPICAL, slow)).plan.ulysses == 2


def test_the_loader_says_which_memory_it_reckons_with():
    crowded = replace(LARGE, free_each=(16 * GIB,))
    text = explain(
        Wish(choose_weights(Wish(AUTO, 2, FLUX_DEV, TYPICAL, crowded), WEIGHTS), 2, FLUX_DEV, TYPICAL, crowded)
    )
    assert "Of a GPU's 130.0 GiB only 16.0 are free, and the plan reckons with these." in text
    assert "does not fit a GPU's 16.0 GiB" in text
    assert "of 16.0 GiB are left" in text
    for free in (128.5, 130):  # contexts are usual
        assert "only" not in explain(Wish(AUTO, 2, FLUX_DEV, TYPICAL, replace(LARGE, free_each=(int(free * GIB),))))


def test_a_ranks_own_context_counts_once():
    """What is free is less by it, and a whole GPU is not."""
    free = 100 * GIB
    alone, crowded = (replace(LARGE, memory_bytes=memory, free_each=(free,)) for memory in (free, LARGE.memory_bytes))
    assert (alone.is_crowded, crowded.is_crowded) == (False, True)
    assert alone.usable_bytes == crowded.usable_bytes
    costs = [choose(Wish(AUTO, 2, FLUX_DEV, TYPICAL, machine)).cost for machine in (alone, crowded)]
    assert costs[0].bytes - costs[1].bytes == GIB
    needs = costs[1].bytes
    assert needs - costs[1].weight_bytes > GIB // 2  # a reserve is left
    for room, fits in ((needs, True), (needs - 1, False)):
        machine = replace(LARGE, free_each=(room,))
        assert (
            "may not fit" in explain(Wish(ParallelConfig(weights="whole", pipe=1), 2, FLUX_DEV, TYPICAL, machine))
        ) != fits


def test_what_does_not_fit_is_said_with_two_ways_out():
    whole = ParallelConfig(weights="whole", pipe=1)
    ways = ways_out(Wish(whole, 2, FLUX_DEV, TYPICAL, SMALL), WEIGHTS)
    assert [way.split(":")[0] for way in ways] == [
        f"Set weights in Parallel Config to {way}" for way in ("spread", "host")
    ]
    text = explain(Wish(whole, 2, FLUX_DEV, TYPICAL, SMALL))
    assert "so that may not fit. Set weights in Parallel Config to spread: that needs about" in text
    assert "and stages to 1" in ways_out(Wish(ParallelConfig(pipe=2), 2, FLUX_DEV, TYPICAL, SMALL), WEIGHTS)[0]
    assert ways_out(Wish(whole, 2, FLUX_DEV, TYPICAL, replace(SMALL, memory_bytes=GIB)), WEIGHTS) == []
