"""What cards without NVLink give: the planner's own prediction for pairs and fours of common cards. Needs no GPU.

    python -m benchmarks.link_model            # the table of docs/slow-links.md
    python -m benchmarks.link_model --checked  # the same of H100s and H200s, beside what was measured
    python -m benchmarks.link_model --bytes    # two cards with int8 or float8 files

A cell is how many times as fast a step is as on one such card, by the exact plan that `auto` takes; 1.0 is one card.
Reckoned are the cards' constants in parallel_runtime/requests/facts.py and a link's rate; a pool measures both.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from parallel_runtime.config import ParallelConfig
from parallel_runtime.planning.plan import choose
from parallel_runtime.planning.wish import Wish
from parallel_runtime.requests.facts import (
    FLOAT8,
    HOST_MEMORY,
    INT8,
    NVLINK,
    LinkFacts,
    ModelFacts,
    RequestFacts,
    known_gpu,
)

from .flux_facts import FLUX_DEV, flux_request

CARDS = ("RTX 3090", "RTX 4090", "RTX 5090", "RTX 5060 Ti")
RATES: Mapping[str, float] = {"x4": 4.0, "x8": 8.0, "x16": 13.0}
"""Of a PCIe 4.0 slot without peer access: 10^9 bytes a second that a card sends through the host's memory."""
COUNTS = (2, 4)
AUTO, BOTH = ParallelConfig(), ParallelConfig(ulysses=2)
"""What `auto` takes, and two cards, also where that would be one."""
FORBIDDEN, HALF, QUARTER = 32.5, 15.8, 7.8
"""Of two H200s whose NVLink is forbidden, as their pool measures it, and of slots that are slowed (slow_slot.py)."""


@dataclass(frozen=True)
class Job:
    """A model at a size.

    Args:
        measured: two H100s over NVLink, times as fast as one (benchmarks/results/in_comfyui.md); 0: not run.
        forbidden: of such rates, two H200s that use no NVLink (benchmarks/results/host_route.md).
    """

    name: str
    model: ModelFacts
    request: RequestFacts
    measured: float = 0.0
    forbidden: Mapping[float, float] = field(default_factory=dict)


def _facts(
    title: str, heads: int, width: int, blocks: int, met: int, more: int = 0, projecting: bool = False
) -> ModelFacts:
    """Facts of a network whose blocks are alike.

    Args:
        met: parameters of a block that a token of the picture meets.
        more: those that it does not meet.
        projecting: of each block, see `ModelFacts.projecting_blocks`.
    """
    sizes = (met + more,) * blocks
    facts = ModelFacts(title, heads, width, sum(sizes), sizes, (1,) * blocks, met * blocks, met * blocks)
    return replace(facts, projecting_blocks=blocks if projecting else 0)


def _square(width: int, count: float) -> int:
    return int(count * width * width)


JOBS = (
    Job(
        "FLUX.1 dev, 1024²",
        FLUX_DEV,
        flux_request(1024),
        measured=124.5 / 70.1,
        forbidden={FORBIDDEN: 125.1 / 85.8, HALF: 125.1 / 92.2, QUARTER: 125.1 / 138.0},
    ),
    Job(
        "Qwen-Image, 1024², CFG",
        _facts("Qwen-Image", 24, 3072, 60, _square(3072, 12), _square(3072, 24), projecting=True),
        RequestFacts(4096, 256, batch=2, rows=64),
        measured=257.7 / 147.1,
    ),
    Job(
        "Z-Image Turbo, 1024²",
        _facts("Z-Image", 30, 3840, 34, _square(3840, 4) + 3 * 3840 * 10240, projecting=True),
        RequestFacts(4096, 128, rows=64, steps=8),
        measured=92.8 / 52.8,
        forbidden={FORBIDDEN: 92.8 / 60.1, HALF: 92.8 / 72.7, QUARTER: 92.8 / 102.6},
    ),
    Job(
        "Wan 2.2 14B, 480p, 81 frames",
        _facts("Wan", 40, 5120, 40, _square(5120, 6) + 2 * 5120 * 13824, _square(5120, 2)),
        RequestFacts(52 * 30 * 21, rows=30 * 21, steps=4),
    ),
    Job(
        "MiniMax H3, 768 × 448, 73 frames",
        replace(_facts("MiniMax H3", 56, 5376, 50, 4 * 5376 * 7168 + 3 * 5376 * 14336), head_dim=128),
        RequestFacts(22 * 14 * 24 + 125, 256, rows=22 * 14, steps=8),
        measured=618.5 / 339.4,
    ),
)


def speed_up(job: Job, card: str, count: int, link: LinkFacts, config: ParallelConfig = AUTO) -> float:
    """Times as fast as one card, by what `auto` takes of `count` cards, or a `config`; memory is enough."""
    choice = choose(Wish(config, count, job.model, job.request, known_gpu(card, 0, link)))
    return choice.alone.seconds / choice.cost.seconds


def through_host(rate: float) -> LinkFacts:
    """A link without peer access, over which heads go our own way."""
    return LinkFacts(HOST_MEMORY.name, rate, HOST_MEMORY.latency, rate, route=rate)


def table() -> str:
    """Markdown: a row for each job and card, a column for each number of cards and slot."""
    slots = "/".join(RATES)
    lines = [
        "| | card | " + " | ".join(f"{count} cards, {slots}" for count in COUNTS) + " |",
        "|---|---|" + "---|" * len(COUNTS),
    ]
    for job in JOBS:
        for place, card in enumerate(CARDS):
            cells = [
                "/".join(f"{speed_up(job, card, count, through_host(rate)):.1f}" for rate in RATES.values())
                for count in COUNTS
            ]
            lines.append(f"| {'' if place else job.name} | {card.removeprefix('RTX ')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def in_bytes() -> str:
    """Markdown: as `table`, of two cards and files whose products are twice as fast; the first does not multiply
    float8."""
    shown = " | ".join(card.removeprefix("RTX ") for card in CARDS)
    lines = [f"| 2 cards, {'/'.join(RATES)} | | {shown} |", "|---|---|" + "---|" * len(CARDS)]
    for job in JOBS:
        for takes in (INT8, FLOAT8) if job.model.projecting_blocks else ():
            model = replace(job.model, bytes_per_parameter=1, parallel_blocks=0, takes=takes)
            cells = [
                "/".join(f"{_twice_as_fast(job, model, card, rate):.1f}" for rate in RATES.values()) for card in CARDS
            ]
            cells[0] = cells[0] if takes == INT8 else ""
            lines.append(f"| {job.name if takes == INT8 else ''} | {takes} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _twice_as_fast(job: Job, model: ModelFacts, card: str, rate: float) -> float:
    machine = replace(known_gpu(card, 0, through_host(rate)), float8=True)
    choice = choose(Wish(AUTO, 2, model, job.request, replace(machine, matmul=2 * machine.matmul)))
    return choice.alone.seconds / choice.cost.seconds


def checked() -> str:
    """Markdown: predicted and measured of two H100s over NVLink, and of two H200s without, by rates of their slots."""
    lines = ["| | predicted | measured |", "|---|---|---|"]
    for job in JOBS:
        if job.measured:
            lines.append(f"| {job.name} | {speed_up(job, 'H100', 2, NVLINK):.2f} | {job.measured:.2f} |")
    for job in JOBS:
        for rate, measured in job.forbidden.items():
            predicted = speed_up(job, "H200", 2, through_host(rate), BOTH)
            lines.append(f"| {job.name}, without NVLink, {rate} GB/s | {predicted:.2f} | {measured:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checked", action="store_true", help="two H100s and H200s, beside what was measured")
    parser.add_argument("--bytes", action="store_true", help="two cards with int8 or float8 files")
    asked = parser.parse_args()
    print(checked() if asked.checked else in_bytes() if asked.bytes else table())


if __name__ == "__main__":
    main()
