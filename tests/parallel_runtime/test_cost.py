"""Predicted times against measured ones, and the facts that they are made from."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.flux_facts import FLUX_DEV, flux_request
from parallel_runtime.config import ParallelPlan
from parallel_runtime.engine import measure
from parallel_runtime.engine.opened import DiffusersFamily
from parallel_runtime.exchange import grown_memory
from parallel_runtime.networks.diffusers.flux import FLUX
from parallel_runtime.networks.facts import describe
from parallel_runtime.networks.stages import all_blocks, let_go
from parallel_runtime.planning.cost import PlannedStep
from parallel_runtime.planning.cut import assign_blocks, most_parameters
from parallel_runtime.requests.facts import CPU, GIB, HOST_MEMORY, NVLINK, PCIE, Seen, known_gpu
from tests.parallel_runtime.polled_memory import PolledMemory
from tests.ranks import run_ranks
from tests.tiny_flux import tiny_config

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
H200 = known_gpu("NVIDIA H200", 130 * GIB, NVLINK)


FLUX_CONFIG = tiny_config(
    num_layers=19, num_single_layers=38, num_attention_heads=24, joint_attention_dim=4096, pooled_projection_dim=768
)


def flux_on_meta() -> Any:
    """FLUX.1-dev itself, without its memory."""
    from diffusers import FluxTransformer2DModel  # here, because the import takes seconds

    with torch.device("meta"):
        return FluxTransformer2DModel(**FLUX_CONFIG)


def test_the_facts_of_flux_dev_are_those_of_the_diffusers_class():
    transformer = flux_on_meta()
    facts = describe(transformer, FLUX.network, "FLUX.1", 2, (2, 2))
    assert facts == FLUX_DEV
    # 74.4 TFLOP at 1024 × 1024 is what docs and papers count.
    tokens = 4096 + 512
    flops = 2 * tokens * facts.image_parameters + 4 * tokens**2 * facts.width * facts.blocks
    assert flops == pytest.approx(74.4e12, rel=0.01)


def test_heads_wider_than_tokens_attend_for_longer_and_more_of_them_travels():
    """MiniMax H3's have 7168 numbers together, its tokens 5376."""
    transformer = flux_on_meta()
    transformer.of_head = 256  # twice as wide as FLUX.1's
    facts = describe(transformer, replace(FLUX.network, head_dim="of_head"), "FLUX.1", 2, (2, 2))
    assert facts == replace(FLUX_DEV, head_dim=256)
    steps = [PlannedStep(ParallelPlan(), each, flux_request(1024), H200, True) for each in (FLUX_DEV, facts)]
    once, twice = (each.attention_seconds(64, 128) for each in steps)
    assert twice == pytest.approx(2 * once)
    # What travels, and over a ring that takes no time, what is merged.
    for rate, plan in (1e-3, ParallelPlan(ulysses=2)), (1e-3, ParallelPlan(ring=2)), (1e15, ParallelPlan(ring=2)):
        machine = replace(H200, link=replace(HOST_MEMORY, all_to_all=rate, peer=rate, latency=0.0))
        steps = [PlannedStep(plan, each, flux_request(1024), machine, True) for each in (FLUX_DEV, facts)]
        once, twice = (each.exchange_seconds(2304, 256, 4608) for each in steps)
        assert twice == pytest.approx(2 * once, rel=1e-3)


def test_a_request_is_described_by_its_shapes():
    family = DiffusersFamily(FLUX, FLUX_CONFIG)
    request = family.describe(Seen((1, 77, 4096), ((2, 16, 65, 128),)), batch=4, steps=9)
    assert (request.tokens, request.text_tokens, request.batch, request.rows) == (33 * 64, 77, 4, 33)
    assert (request.steps, request.in_pool) == (9, True)
    assert not family.describe(Seen((1, 77, 4096), ((2, 16, 64, 64),)), batch=2).in_pool


@pytest.mark.parametrize("memory", [130, 12, 8], ids=["assigned by time", "by time as far as it fits", "by parameters"])
def test_the_fullest_rank_is_predicted_with_the_weights_that_its_stage_holds(memory):
    plan, machine = ParallelPlan(pipe=4, patches=4, warmup_steps=1), replace(H200, memory_bytes=memory * GIB)
    held = []
    for stage in range(4):
        transformer = flux_on_meta()
        most = most_parameters(machine.memory_bytes, 2)
        blocks = all_blocks(transformer, FLUX.cut)
        sizes = tuple(sum(parameter.numel() for parameter in block.parameters()) for block in blocks)
        owned = assign_blocks(sizes, 4, most)[stage]
        let_go(transformer, FLUX.cut, owned)
        held.append(sum(2 * parameter.numel() for parameter in transformer.parameters()))
    # Keys and values weigh less than the difference of two stages here.
    assert PlannedStep(plan, FLUX_DEV, flux_request(256), machine, True).cost().weight_bytes == max(held)
    if memory == 130:
        rows = json.loads((RESULTS / "pipefusion_step.json").read_text())["rows"]
        measured = [row["weights_gib"] for row in rows if row["plan"].startswith("stages 4 ")]
        assert measured == pytest.approx([max(held) / GIB] * len(measured), rel=1e-3)
        assert measured
    if memory == 12:
        assert max(held) <= 0.85 * memory * GIB  # and the layers outside of the blocks


def test_stages_that_hold_all_blocks_and_one_rank_weigh_as_much_and_only_stages_keep_keys_and_values():
    request, plan = flux_request(1024), ParallelPlan(pipe=4, patches=4, warmup_steps=1)
    whole, stages, unsplit = (
        PlannedStep(plan, FLUX_DEV, request, H200, True, split).cost()
        for plan, split in ((ParallelPlan(), True), (plan, True), (plan, False))
    )
    assert whole.weight_bytes == unsplit.weight_bytes == FLUX_DEV.parameters * 2 > stages.weight_bytes
    assert (stages.stage_blocks, stages.buffer_bytes) == ((14, 14, 14, 15), 2 * (4096 + 512) * 3072 * 2 * 14)
    assert unsplit.buffer_bytes == 2 * (4096 + 512) * 3072 * 2 * 15
    assert whole.buffer_bytes == 0


def test_unlike_ranks_are_predicted_to_share_by_their_speed():
    """The facts of a machine are those of its slowest rank; what an equal share costs there is the unit."""
    fast = replace(H200, speeds=(1.0, 0.5))

    def computing(machine, **plan) -> float:
        cost = PlannedStep(ParallelPlan(**plan), FLUX_DEV, flux_request(2048), machine, True).cost()
        return cost.seconds - cost.exchange_seconds

    staged = {"pipe": 2, "patches": 2, "warmup_steps": 1}
    # Two thirds of the tokens, at twice the speed, instead of a half.
    assert computing(fast, ulysses=2) == pytest.approx(computing(H200, ulysses=2) * 2 / 3, rel=0.05)
    assert computing(fast) == pytest.approx(computing(H200) / 2, rel=0.01)
    assert computing(replace(H200, speeds=(0.5, 1.0))) == computing(H200)
    # Stages get as many blocks each, and the ranks of a stage as many tokens.
    four = replace(H200, speeds=(1.0, 0.5, 0.5, 1.0))
    for plan, machine in ((staged, fast), ({"ulysses": 2, **staged}, four)):
        assert computing(machine, **plan) == computing(H200, **plan)


def test_warm_up_and_step_by_step_sampling_make_stages_slower_and_links_make_ulysses_slower():
    def seconds(machine=H200, request=flux_request(1024), **plan) -> float:  # noqa: B008 - frozen
        return PlannedStep(ParallelPlan(**plan), FLUX_DEV, request, machine, True).cost().seconds

    short, long = seconds(pipe=4, patches=4, warmup_steps=1), seconds(pipe=4, patches=4, warmup_steps=9)
    step_by_step = seconds(pipe=4, patches=4, warmup_steps=1, request=replace(flux_request(1024), in_pool=False))
    assert short < long < step_by_step
    assert seconds(pipe=4, patches=2, warmup_steps=1) > short  # two stages always wait
    without_p2p = replace(H200, link=HOST_MEMORY)
    assert seconds(without_p2p, ulysses=4) > 1.5 * seconds(ulysses=4)
    assert seconds(without_p2p, pipe=4, patches=4, warmup_steps=1) < seconds(without_p2p, ulysses=4)
    # Nine heads on four ranks: each computes three of twelve.
    odd = replace(FLUX_DEV, heads=9, head_dim=0)
    padded, even = (
        PlannedStep(ParallelPlan(ulysses=4), m, flux_request(2048), H200, True).cost() for m in (odd, FLUX_DEV)
    )
    assert padded.seconds > even.seconds


def test_weights_that_ranks_share_are_read_once_by_the_ranks_of_a_sequence_group_together():
    unshared = replace(FLUX_DEV, shared_parameters=0)

    def gained(**plan) -> float:
        whole, shared = (
            PlannedStep(ParallelPlan(**plan), model, flux_request(1024), H200, True).cost().seconds
            for model in (unshared, FLUX_DEV)
        )
        return whole - shared

    read = FLUX_DEV.shared_parameters * 2 / (H200.memory_rate * 1e9)
    assert gained() == gained(cfg=2) == 0
    assert gained(ulysses=4) == pytest.approx(3 / 4 * read) == gained(ring=2, ulysses=2)


def test_only_ulysses_over_peer_memory_hides_the_exchange_of_parallel_blocks_and_only_behind_their_products():
    serial = replace(FLUX_DEV, parallel_blocks=0)

    def hidden(link=NVLINK, compiled=True, **plan) -> float:
        machine = replace(H200, link=link)
        exposed, partly = (
            PlannedStep(ParallelPlan(**plan), model, flux_request(1024), machine, compiled).cost().exchange_seconds
            for model in (serial, FLUX_DEV)
        )
        return exposed - partly

    sent = 4 * (4096 + 512) / 4 * 3072 * 2 * 3 / 4  # query, key, value and output, three of four heads of each
    assert hidden(ulysses=4) == pytest.approx(38 * sent / (NVLINK.all_to_all * 1e9))
    feed_forward = 2 * (4096 + 512) / 4 * (2 * 3072 * 12288) / (H200.matmul * 1e12)
    assert hidden(replace(PCIE, all_to_all=2.0), ulysses=4) == pytest.approx(38 * feed_forward, rel=0.01)
    assert hidden(compiled=False, ulysses=4) == hidden(HOST_MEMORY, ulysses=4) == hidden(ring=2, ulysses=2) == 0
    assert hidden(pipe=2, ulysses=2, patches=2, warmup_steps=1) == 0


def test_groups_that_span_hosts_are_as_fast_as_the_network():
    hosts = replace(H200, network=HOST_MEMORY, ranks_per_host=2)
    inside = PlannedStep(ParallelPlan(ulysses=2), FLUX_DEV, flux_request(1024), hosts, True).cost()
    across = PlannedStep(ParallelPlan(ulysses=4), FLUX_DEV, flux_request(1024), hosts, True).cost()
    assert inside.exchange_seconds < across.exchange_seconds
    apart = PlannedStep(ParallelPlan(cfg=2, ulysses=2), FLUX_DEV, flux_request(1024, 2), hosts, True).cost()
    assert apart.exchange_seconds == inside.exchange_seconds


def measure_on_rank(rank: int, world_size: int) -> dict[str, Any]:
    """Links of gloo, and a GPU's rates taken on the CPU in small."""
    device = torch.device("cpu")
    # A GPU's sizes would take a minute here.
    measure._EXCHANGED, measure._COPIED, measure._SHAPE, measure._LONGER = 2**18, 2**20, (256, 512, 0, 4), 1
    link = measure.measure_link(device, world_size, HOST_MEMORY)
    host = measure.measure_host(device, world_size)
    grown_memory.StreamMemory = PolledMemory  # type: ignore[misc]
    link = replace(link, route=measure.measure_route(device, world_size))
    return asdict(link) | {"host": host, "machine": measure.measure_machine(CPU, device, world_size) == CPU}


def test_a_link_is_measured_alike_on_all_ranks():
    first, second = run_ranks(2, f"{__name__}:measure_on_rank")
    assert first == second
    assert first["measured"]
    assert first["name"] == HOST_MEMORY.name
    assert first["machine"]
    # Loopback: somewhere between a slow network and memory.
    assert 0.01 < first["all_to_all"] < 100
    assert 0.01 < first["peer"] < 100
    assert 1e-7 < first["latency"] < 0.1
    assert 0.01 < first["host"] < 1000
    assert 0.01 < first["route"] < 1000


def test_the_rates_of_a_device_are_measured_in_the_units_of_the_facts(monkeypatch):
    monkeypatch.setattr(measure, "_WARM_SECONDS", 0.0)
    monkeypatch.setattr(measure, "_TIMED_SECONDS", 0.0)
    monkeypatch.setattr(measure, "_SHAPE", (64, 256, 512, 2))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    products, attention, memory = measure._gpu_rates(torch.device("cpu"))
    assert 1e-6 < attention < 100
    assert 1e-6 < products < 100
    assert 0.01 < memory < 10_000


def test_nothing_is_measured_on_the_cpu():
    assert measure.measure_machine(CPU, torch.device("cpu"), 1) is CPU


@pytest.mark.parametrize("stored", [1, 2])
def test_what_a_quantised_file_computes_is_sent_in_16_bit(stored):
    machine, request = known_gpu("NVIDIA GeForce RTX 4090", 0, HOST_MEMORY), flux_request(1024)
    plain, found = (
        PlannedStep(ParallelPlan(ulysses=2), replace(FLUX_DEV, bytes_per_parameter=size), request, machine, True).cost()
        for size in (2, stored)
    )
    assert found.exchange_seconds == plain.exchange_seconds
    assert found.weight_bytes == plain.weight_bytes * stored / 2
