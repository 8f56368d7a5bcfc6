"""What cards without NVLink give: the planner's own prediction for pairs and fours of common cards. Needs no GPU.

    python -m benchmarks.link_model            # the table of docs/slow-links.md
    python -m benchmarks.link_model --checked  # the same of two H100s, beside what was measured there
    python -m benchmarks.link_model --splits   # another way to share out a picture, which is not built, beside ours

A cell is how many times as fast a step is as on one such card, by the exact plan that `auto` takes; 1.0 is one card.
Reckoned are the cards' constants in parallel_runtime/requests/facts.py and a link's rate; a pool measures both.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from parallel_runtime.config import ParallelConfig, ParallelPlan
from parallel_runtime.planning import cost_constants as fitted
from parallel_runtime.planning.cost import Cost, PlannedStep
from parallel_runtime.planning.plan import choose
from parallel_runtime.planning.wish import Wish
from parallel_runtime.requests.facts import (
    HOST_MEMORY,
    NVLINK,
    LinkFacts,
    MachineFacts,
    ModelFacts,
    RequestFacts,
    known_gpu,
)

from .flux_facts import FLUX_DEV, flux_request

CARDS = ("RTX 3090", "RTX 4090", "RTX 5090", "RTX 5060 Ti")
RATES: Mapping[str, float] = {"x4": 4.0, "x8": 8.0, "x16": 13.0}
"""Of a PCIe 4.0 slot without peer access: 10^9 bytes a second that a card sends through the host's memory."""
COUNTS = (2, 4)
FORBIDDEN = 23.0
"""Of two H100s whose NVLink is forbidden, as benchmarks.host_route measures it."""


@dataclass(frozen=True)
class Job:
    """A model at a size.

    Args:
        measured: two H100s over NVLink, times as fast as one (benchmarks/results/in_comfyui.md); 0: not run.
        forbidden: the same with NCCL_P2P_DISABLE=1 (benchmarks/results/host_route.md).
    """

    name: str
    model: ModelFacts
    request: RequestFacts
    measured: float = 0.0
    forbidden: float = 0.0


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
    Job("FLUX.1 dev, 1024²", FLUX_DEV, flux_request(1024), measured=124.5 / 70.1, forbidden=124.5 / 95.3),
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
        forbidden=92.8 / 75.5,
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
    choice = choose(Wish(ParallelConfig(), count, job.model, job.request, known_gpu(card, 0, link)))
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


_PIECES = 4
"""In which a gathered input would come: what has come is multiplied meanwhile."""


@dataclass(frozen=True)
class Split:
    """One picture of a job at CFG 1, whose tokens cards share out that are joined through the host's memory.

    Args:
        rate: as in RATES.
        eight_bit: layers take quantised activations: products are twice as fast, and an input travels in bytes.
    """

    job: Job
    card: str
    count: int
    rate: float
    eight_bit: bool = False

    def speed_ups(self) -> tuple[float, float]:
        """Times as fast as one card: with queries, keys and values exchanged; with the blocks' input gathered."""
        alone, shared = self._cost(1).seconds, self._cost(self.count)
        computed = shared.seconds - shared.exchange_seconds
        return alone / shared.seconds, alone / (computed + self._gathered())

    @property
    def _machine(self) -> MachineFacts:
        machine = known_gpu(self.card, 0, through_host(self.rate))
        return replace(machine, matmul=machine.matmul * (2 if self.eight_bit else 1))

    def _cost(self, count: int) -> Cost:
        model, request = self.job.model, replace(self.job.request, batch=1)
        if self.eight_bit:  # one product makes all that a block's input is multiplied with
            model = replace(model, parallel_blocks=0)
        return PlannedStep(ParallelPlan(ulysses=count), model, request, self._machine, compiled=True).cost()

    def _of_block(self) -> tuple[float, float, float]:
        """Seconds of a block on one of the cards: the way of an activation of its tokens, the products that make
        queries, keys and values, attention."""
        model, request, machine = self.job.model, self.job.request, self._machine
        tokens = request.tokens + request.text_tokens
        own = tokens / self.count
        way = own * model.width * model.bytes_per_number / (self.rate * 1e9)
        products = 2 * own * 3 * model.width**2 / (machine.matmul * 1e12)
        padded = -(-model.heads // self.count) * self.count / model.heads
        return way, products, 4 * own * tokens * model.width * padded / (machine.attention * 1e12)

    def _gathered(self) -> float:
        """Seconds that show where inputs come in pieces behind products of what has come, and attended values leave
        as today, behind attention with other heads."""
        way, products, attention = self._of_block()
        others, seen = self.count - 1, fitted.SEEN_OF_EXCHANGE
        comes = way * others / (2 if self.eight_bit else 1)
        last = products * others / self.count / _PIECES
        leaves = way * others / self.count
        shown = max(0.0, comes + last - products) + seen * leaves + max(0.0, (1 - seen) * (leaves - attention))
        return self.job.model.blocks * (2 * HOST_MEMORY.latency + shown)


def splits(count: int, eight_bit: bool, cards: Sequence[str] = CARDS, slots: Sequence[str] = tuple(RATES)) -> str:
    """Markdown: a row for each job, a column for each card and slot, with `Split.speed_ups` of so many cards."""
    columns = [(card, slot) for card in cards for slot in slots]
    shown = " | ".join(f"{card.removeprefix('RTX ')}, {slot}" for card, slot in columns)
    lines = [f"| {count} cards, {8 if eight_bit else 16} bit | {shown} |", "|---|" + "---|" * len(columns)]
    for job in JOBS:
        found = [Split(job, card, count, RATES[slot], eight_bit).speed_ups() for card, slot in columns]
        cells = ["/".join(f"{each:.2f}" for each in of) for of in found]
        lines.append(f"| {job.name.removesuffix(', CFG')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def all_splits() -> str:
    """Markdown: those of two and three cards, with 16 bit and 8."""
    return "\n\n".join(splits(count, eight_bit) for count in (2, 3) for eight_bit in (False, True))


def checked() -> str:
    """Markdown: predicted and measured of two H100s, over NVLink and without."""
    lines = ["| | predicted | measured |", "|---|---|---|"]
    links = [(NVLINK, "", "measured"), (through_host(FORBIDDEN), ", NVLink forbidden", "forbidden")]
    for link, way, field in links:
        for job in JOBS:
            if measured := getattr(job, field):
                lines.append(f"| {job.name}{way} | {speed_up(job, 'H100', 2, link):.2f} | {measured:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checked", action="store_true", help="two H100s, beside what was measured")
    parser.add_argument("--splits", action="store_true", help="another way to share out one picture, beside ours")
    asked = parser.parse_args()
    print(checked() if asked.checked else all_splits() if asked.splits else table())


if __name__ == "__main__":
    main()
