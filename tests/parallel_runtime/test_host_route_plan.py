"""What plans reckon with where heads, or what they are made of, go through the host's memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.flux_facts import FLUX_DEV, flux_request
from parallel_runtime.config import ParallelPlan
from parallel_runtime.planning.cost import PlannedStep
from parallel_runtime.planning.host_route import bytes_of_inputs
from parallel_runtime.requests.facts import FLOAT8, GIB, HOST_MEMORY, INT8, PLAIN, ModelFacts, known_gpu

H200 = known_gpu("NVIDIA H200", 130 * GIB, HOST_MEMORY)
WITHOUT_LAYERS = replace(FLUX_DEV, projecting_blocks=0)
SERIAL = replace(WITHOUT_LAYERS, parallel_blocks=0)


def exchanged(rate: float, route: float, model: ModelFacts = SERIAL, compiled: bool = True, **plan) -> float:
    """Seconds of a step's exchange; rates of NCCL and of our way through the host's memory."""
    machine = replace(H200, link=replace(HOST_MEMORY, all_to_all=rate, latency=0.0, route=route), float8=True)
    return PlannedStep(ParallelPlan(**plan), model, flux_request(1024), machine, compiled).cost().exchange_seconds


def test_our_way_through_the_host_hides_all_but_a_part_behind_attention_or_as_much_as_attention_takes():
    tokens = 4096 + 512
    sent = FLUX_DEV.blocks * 4 * tokens / 2 * 3072 * 2 / 2  # query, key, value and output, half of the heads
    attention = FLUX_DEV.blocks * 4 * tokens / 2 * tokens * 3072 / (H200.attention * 1e12)
    assert exchanged(1.0, 300.0, ulysses=2) == pytest.approx(sent / 300e9 * 0.31)
    assert exchanged(300.0, 1.0, ulysses=2) == pytest.approx(sent / 1e9 - attention * 0.69)
    assert exchanged(5.0, 300.0, ring=2, ulysses=2) == exchanged(5.0, 0.0, ring=2, ulysses=2)  # NCCL's
    assert exchanged(5.0, 5.0, ulysses=2) < exchanged(5.0, 0.0, ulysses=2)
    # Compiled, behind the feed-forward layers of parallel blocks, too: as long as these take, or nearly all of it.
    layer = 2 * tokens / 2 * (2 / 3 * FLUX_DEV.image_parameters / FLUX_DEV.blocks) / (H200.matmul * 1e12)
    hidden = exchanged(300.0, 1.0, ulysses=2) - exchanged(300.0, 1.0, WITHOUT_LAYERS, ulysses=2)
    assert hidden == pytest.approx(38 * layer)
    share = 38 / FLUX_DEV.blocks
    fast = sent / 300e9 * (0.31 * (1 - share) + 0.06 * share)
    assert exchanged(1.0, 300.0, WITHOUT_LAYERS, ulysses=2) == pytest.approx(fast)
    alike = exchanged(1.0, 300.0, FLUX_DEV, compiled=False, ulysses=2)
    assert alike == exchanged(1.0, 300.0, compiled=False, ulysses=2)


def test_ranks_send_inputs_where_their_way_and_the_others_keys_and_values_show_less_than_heads():
    tokens, projecting = 4096 + 512, replace(FLUX_DEV, parallel_blocks=0)
    products = FLUX_DEV.blocks * 2 * tokens * 3 * 3072**2 / (H200.matmul * 1e12)  # of all ranks
    passed = FLUX_DEV.blocks * tokens * 3072 * 2 / (H200.memory_rate * 1e9)
    float8 = replace(projecting, takes=FLOAT8)
    for ranks in (2, 3, 4, 6):
        sent = FLUX_DEV.blocks * 4 * tokens / ranks * 3072 * 2 * (ranks - 1) / ranks
        of_others = (ranks - 1) * (products * 2 / 3 * 1.25 + passed * 11) / ranks
        assert exchanged(1.0, 1e6, projecting, ulysses=ranks) == pytest.approx(sent / 1e15 * 0.31)
        # On a slow link all own products are through when the last piece of four comes.
        inputs, halves = (sent * part * ranks / 4 / 1e9 + of_others / 4 - products / ranks for part in (1, 1 / 2))
        heads = exchanged(300.0, 1.0, ulysses=ranks)
        assert (inputs < heads) == (ranks < 4)
        assert exchanged(300.0, 1.0, projecting, ulysses=ranks) == pytest.approx(min(inputs, heads))
        assert exchanged(300.0, 1.0, float8, ulysses=ranks) == pytest.approx(halves)
    # On a faster one it is what they make besides that shows.
    own = (products * 2 / 3 * 1.25 + passed * 11) / 2
    assert exchanged(300.0, 60.0, projecting, ulysses=2) == pytest.approx(own)
    layers = 38 * 2 * tokens / 2 * (2 / 3 * FLUX_DEV.image_parameters / FLUX_DEV.blocks) / (H200.matmul * 1e12)
    beside = exchanged(300.0, 1.0, projecting, ulysses=2) - exchanged(300.0, 1.0, FLUX_DEV, ulysses=2)
    assert beside == pytest.approx(layers)
    old = replace(H200, link=replace(HOST_MEMORY, latency=0.0, route=1.0))  # GPUs that do not multiply it
    cost = PlannedStep(ParallelPlan(ulysses=2), float8, flux_request(1024), old, True).cost()
    assert cost.exchange_seconds == pytest.approx(exchanged(300.0, 1.0, ulysses=2))
    uneven = replace(projecting, heads=23, head_dim=0)  # nor can ranks have as many heads each
    assert exchanged(300.0, 1.0, uneven, ulysses=2) > exchanged(300.0, 1.0, ulysses=2)


@pytest.mark.parametrize(("card", "rate", "tokens", "number", "sooner"), [
    ("4090", 8.0, 4608, 2, True), ("4090", 8.0, 4 * 4608, 2, False), ("4090", 8.0, 4 * 4608, 1, True),
    ("3090", 13.0, 4608, 2, False), ("4090", 0.0, 4608, 2, False), ("4090", 4.0, 2 * 4608, 1, True),
])  # fmt: skip
def test_inputs_go_where_attention_hides_less_than_they_spare(card, rate, tokens, number, sooner):
    machine = known_gpu(card, 0, replace(HOST_MEMORY, route=rate))
    halves = tokens // 2, tokens - tokens // 2
    assert bytes_of_inputs(machine, 3072, 3072, number, 1, halves) == (number if sooner else 0)


@pytest.mark.parametrize("rate", [4.0, 8.0, 13.0])
@pytest.mark.parametrize("card", ["RTX 3090", "RTX 4090"])
def test_long_videos_hide_heads_behind_attention_so_that_inputs_gain_nothing(card, rate):
    machine = known_gpu(card, 0, replace(HOST_MEMORY, route=rate))
    wan = 52 * 30 * 21 // 2
    assert not bytes_of_inputs(machine, 5120, 5120, 2, 1, (wan, wan))


@pytest.mark.parametrize(("rate", "number"), [(44.0, 2), (33.0, 2), (17.0, 1), (8.0, 1), (0.0, 0)])
def test_layers_round_what_they_send_where_it_was_measured_to_be_sooner(rate, number):
    machine = replace(known_gpu("H200", 0, replace(HOST_MEMORY, route=rate)), matmul=690.0, attention=595.0)
    assert bytes_of_inputs(machine, 3072, 3072, 2, 1, (2304, 2304), rounds=True) == number


def test_plans_take_the_better_of_both():
    inputs = {takes: replace(SERIAL, projecting_blocks=57, takes=takes) for takes in (PLAIN, INT8, FLOAT8)}
    for rate, alike in ((33.0, PLAIN), (8.0, INT8)):
        plain, int8, float8 = (exchanged(300.0, rate, model, ulysses=2) for model in inputs.values())
        assert float8 < int8 <= plain
        assert (int8 == plain) == (alike == PLAIN)
