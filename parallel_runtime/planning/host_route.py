"""What is seen of one block's exchange through the host's memory (exchange/host_exchange.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..requests.facts import FLOAT8, INT8, MachineFacts, ModelFacts
from ..switches import is_on
from . import cost_constants as fitted

_BYTES = 2  # of a number


@dataclass(frozen=True)
class OnRoute:
    """An exchange that moves queries, keys, values and attended values for so many seconds, and what a rank computes
    meanwhile, in seconds: attention, what makes queries, keys and values, and a feed-forward layer beside attention.
    `passed`: of a pass of memory over queries, keys or values; `rounded`: of rounding inputs to int8 for others."""

    moved: float
    attention: float
    made: float
    beside: float
    passed: float
    rounded: float

    @property
    def shown(self) -> float:
        """Behind attention alone."""
        return self.moved - min(self.moved, self.attention) * (1 - fitted.SEEN_OF_EXCHANGE)

    @property
    def of_heads(self) -> float:
        """Behind the layer beside attention, too."""
        return max(fitted.SEEN_BESIDE * self.moved, self.shown - self.beside)

    def of_inputs(self, ranks: int, width: float, rounds: bool = False) -> float:
        """Of ranks that send inputs instead, of numbers so wide against those that are computed, with what the keys and
        values of the others' tokens take besides: nothing comes back, and attention waits for all. `rounds`: to int8,
        before they go."""
        of_each = self.made * 2 / 3 * fitted.IN_PIECES + self.passed * fitted.INPUT_PASSES
        comes, more = self.moved * ranks / 4 * width, (ranks - 1) * of_each
        meanwhile = self.made + self.beside
        rounding = self.rounded if rounds else 0.0
        return max(comes + more * fitted.LAST_OF_INPUT, meanwhile + more) - meanwhile + rounding

    def ways(self, ranks: int, width: float, number: int, rounds: bool) -> dict[int, float]:
        """Seconds by the bytes in which a number of an input goes: 0 of heads, `number`, and 1 where layers round it to
        int8. `width`: of inputs of a byte for a number, against what is computed."""
        found = {0: self.of_heads, number: self.of_inputs(ranks, number * width)}
        return found | ({1: self.of_inputs(ranks, width, rounds=True)} if rounds else {})


def on_route(
    machine: MachineFacts, ranks: int, rows: float, keys: float, inner: float, width: float, beside: float = 0.0, *,
    number: int = _BYTES, slowdown: float = 1.0,
) -> OnRoute:  # fmt: skip
    """The exchange of an attention with so many tokens of a rank's and keys: of `inner` numbers of all heads together,
    of so many bytes, made of `width` numbers, beside a layer of so many parameters. `slowdown`: of what is computed,
    against 16 bit."""
    matmul, attending = (rate * 1e12 / slowdown for rate in (machine.matmul, machine.attention))
    moved = 4 * rows * inner * number * (1 - 1 / ranks) / (machine.link.route * 1e9)
    made, layer = 2 * rows * 3 * width * inner / matmul, 2 * rows * beside / matmul
    passed = rows * inner * number / (machine.memory_rate * 1e9)
    rounded = rows * width * fitted.ROUNDING_SECONDS
    return OnRoute(moved, 4 * rows * keys * inner / attending, made, layer, passed, rounded)


def of_compiled(model: ModelFacts, block: OnRoute, ranks: int, float8: bool) -> tuple[float, int]:
    """Seconds that are seen of all blocks' exchanges, between GPUs that multiply `float8` or do not, and how many of
    the blocks send inputs."""
    known = model.heads % ranks == 0 and (float8 or model.takes != FLOAT8)
    parallel, projecting = (each if is_on("blocks") else 0 for each in (model.parallel_blocks, model.projecting_blocks))
    projecting = projecting if known else 0
    others = max(0, projecting - parallel)
    number = 1 if model.takes == FLOAT8 else model.bytes_per_number
    seconds, sending = (model.blocks - parallel - others) * block.shown, 0
    for count, each in ((parallel, block), (others, replace(block, beside=0.0))):
        ways = {0: each.of_heads}
        if projecting and is_on("gather"):
            ways = each.ways(ranks, 1 / model.bytes_per_number, number, model.takes == INT8)
        best = min(ways, key=ways.__getitem__)
        seconds += count * ways[best]
        sending += count * (best > 0)
    return seconds, sending


def bytes_of_inputs(
    machine: MachineFacts, inner: int, width: int, number: int, batch: int, lengths: Sequence[int], beside: int = 0,
    rounds: bool = False,
) -> int:  # fmt: skip
    """Bytes in which ranks with so many tokens had better send what a block's layers take of a token, `width` numbers
    of `number` bytes (of several inputs those of all), or of one where layers round them to int8 (`rounds`); 0 where
    they had better send heads, `inner` numbers of all together in 16 bit. `beside`: parameters of a layer beside
    attention. The same on all."""
    if not machine.link.route:
        return 0
    ranks = len(lengths)
    block = on_route(machine, ranks, batch * max(lengths), sum(lengths), inner, width, beside)
    ways = block.ways(ranks, width / (_BYTES * inner), number, rounds)
    return min(ways, key=ways.__getitem__)
