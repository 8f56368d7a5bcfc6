"""What cards without NVLink give: the planner's own prediction for pairs and fours of common cards. Needs no GPU.

    python -m benchmarks.link_model            # the table of docs/slow-links.md
    python -m benchmarks.link_model --checked  # the same prediction of two H100s, beside what was measured there

A cell is how many times as fast a step is as on one such card, by the exact plan that `auto` takes; 1.0 is one card.
Reckoned are the cards' constants in parallel_runtime/requests/facts.py and a link's rate; a pool measures both.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

from parallel_runtime.config import ParallelConfig
from parallel_runtime.planning.plan import choose
from parallel_runtime.requests.facts import HOST_MEMORY, NVLINK, LinkFacts, ModelFacts, RequestFacts, known_gpu

from .flux_facts import FLUX_DEV, flux_request

CARDS = ("RTX 3090", "RTX 4090", "RTX 5090", "RTX 5060 Ti")
RATES: Mapping[str, float] = {"x4": 4.0, "x8": 8.0, "x16": 13.0}
"""Of a PCIe 4.0 slot without peer access: 10^9 bytes a second that a card sends through the host's memory."""
COUNTS = (2, 4)


@dataclass(frozen=True)
class Job:
    """A model at a size.

    Args:
        measured: two H100s over NVLink, times as fast as one (benchmarks/results/in_comfyui.md); 0: not run.
    """

    name: str
    model: ModelFacts
    request: RequestFacts
    measured: float = 0.0


def _facts(title: str, heads: int, width: int, blocks: int, met: int, more: int = 0) -> ModelFacts:
    """Facts of a network whose blocks are alike.

    Args:
        met: parameters of a block that a token of the picture meets.
        more: those that it does not meet.
    """
    sizes = (met + more,) * blocks
    return ModelFacts(title, heads, width, sum(sizes), sizes, (1,) * blocks, met * blocks, met * blocks)


def _square(width: int, count: float) -> int:
    return int(count * width * width)


JOBS = (
    Job("FLUX.1 dev, 1024²", FLUX_DEV, flux_request(1024), measured=124.5 / 70.1),
    Job(
        "Qwen-Image, 1024², CFG",
        _facts("Qwen-Image", 24, 3072, 60, _square(3072, 12), _square(3072, 24)),
        RequestFacts(4096, 256, batch=2, rows=64),
        measured=257.7 / 147.1,
    ),
    Job(
        "Z-Image Turbo, 1024²",
        _facts("Z-Image", 30, 3840, 34, _square(3840, 4) + 3 * 3840 * 10240),
        RequestFacts(4096, 128, rows=64, steps=8),
        measured=92.8 / 52.8,
    ),
    Job(
        "Wan 2.2 14B, 480p, 81 frames",
        _facts("Wan", 40, 5120, 40, _square(5120, 6) + 2 * 5120 * 13824, _square(5120, 2)),
        RequestFacts(52 * 30 * 21, rows=30 * 21, steps=4),
    ),
    Job(
        "MiniMax H3, 768 × 448, 73 frames",
        _facts("MiniMax H3", 56, 5376, 50, 4 * 5376 * 7168 + 3 * 5376 * 14336),
        RequestFacts(22 * 14 * 24 + 125, 256, rows=22 * 14, steps=8),
        measured=618.5 / 339.4,
    ),
)


def speed_up(job: Job, card: str, count: int, link: LinkFacts) -> float:
    """Times as fast as one card, by what `auto` takes of `count` cards; memory is enough."""
    choice = choose(ParallelConfig(), count, job.model, job.request, known_gpu(card, 0, link))
    return choice.alone.seconds / choice.cost.seconds


def through_host(rate: float) -> LinkFacts:
    """A link without peer access, over which heads go our own way."""
    return LinkFacts(HOST_MEMORY.name, rate, HOST_MEMORY.latency, rate, route=rate)


def table() -> str:
    """Markdown: a row for each job and card, a column for each number of cards and slot."""
    columns = [(count, slot) for count in COUNTS for slot in RATES]
    lines = [
        "| | card | " + " | ".join(f"{count} cards, {slot}" for count, slot in columns) + " |",
        "|---|---|" + "---|" * len(columns),
    ]
    for job in JOBS:
        for place, card in enumerate(CARDS):
            cells = [f"{speed_up(job, card, count, through_host(RATES[slot])):.1f}" for count, slot in columns]
            lines.append(f"| {'' if place else job.name} | {card.removeprefix('RTX ')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def checked() -> str:
    """Markdown: predicted and measured of two H100s."""
    lines = ["| | predicted | measured |", "|---|---|---|"]
    for job in JOBS:
        if job.measured:
            lines.append(f"| {job.name} | {speed_up(job, 'H100', 2, NVLINK):.2f} | {job.measured:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checked", action="store_true", help="two H100s over NVLink, beside what was measured")
    print(checked() if parser.parse_args().checked else table())


if __name__ == "__main__":
    main()
