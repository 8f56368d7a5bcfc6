"""Weights that come block by block: which come, what they take of a GPU, and how long their bytes are on the way."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import STREAMED, ParallelConfig
from ..requests.facts import LinkFacts, MachineFacts, ModelFacts

SLOTS = 2  # places on a device that the blocks which come to it use in turn


def resident_blocks(count: int, blocks: int) -> tuple[int, ...]:
    """Which blocks stay whole on every rank, where so many do, as `evenly`. One block at least comes."""
    return evenly(min(count, blocks - 1), blocks)


def evenly(count: int, blocks: int) -> tuple[int, ...]:
    """So many of the blocks, all at most: the first, and others evenly between those that come, so that these are on
    their way meanwhile."""
    count = min(count, blocks)
    return tuple(number * blocks // count for number in range(count))


@dataclass(frozen=True)
class Coming:
    """How weights come ("dealt", "host") to so many ranks that keep shares; resident and held as in ParallelConfig."""

    weights: str
    ranks: int
    resident: int = 0
    held: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: ParallelConfig, ranks: int) -> Coming | None:
        """As a configuration has them; None where they are on the GPUs."""
        return cls(config.weights, ranks, config.resident, config.held) if config.weights in STREAMED else None

    def sizes(self, model: ModelFacts, held: int = 0) -> list[int]:
        """Parameters of each block that comes to a rank that keeps so many of the others."""
        stay = set(resident_blocks(self.resident, model.blocks))
        coming = [size for block, size in enumerate(model.block_sizes) if block not in stay]
        places = set(evenly(held, len(coming)))
        return [size for block, size in enumerate(coming) if block not in places]

    def kept_bytes(self, model: ModelFacts, held: int = 0) -> int:
        """Bytes of weights on the GPU of such a rank."""
        sizes = self.sizes(model, held)
        beside = model.parameters - sum(sizes) + SLOTS * max(sizes, default=0)
        share = -(-sum(self.sizes(model)) // self.ranks) if self.weights == "dealt" else 0
        return (beside + share) * model.bytes_per_parameter

    def copied_bytes(self, model: ModelFacts, used: int | None = None) -> int:
        """Bytes that a GPU copies in a step, of `used` ranks or all the one that copies the most; of its own share it
        has a copy on the device."""
        coming = max(sum(self.sizes(model, held)) for held in self.held[:used] or (0,)) * model.bytes_per_parameter
        return coming - coming // self.ranks if self.weights == "dealt" else coming

    def link(self, machine: MachineFacts) -> LinkFacts:
        """What they come over."""
        return machine.link if self.weights == "dealt" else machine.host_link

    def seconds(self, model: ModelFacts, machine: MachineFacts, used: int | None = None) -> float:
        """Seconds of a step's copies over their link; blocks compute meanwhile."""
        return self.copied_bytes(model, used) / (self.link(machine).peer * 1e9) if machine.on_gpu else 0.0
