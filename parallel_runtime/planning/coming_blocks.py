"""What weights that come block by block take of a GPU, and how long their bytes are on the way. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import STREAMED, ParallelConfig
from ..requests.facts import LinkFacts, MachineFacts, ModelFacts
from ..streaming.deal import dealt_blocks, resident_blocks

SLOTS = 2
"""As `streaming.block_stream` has it; here without torch."""


@dataclass(frozen=True)
class Coming:
    """How weights come.

    Args:
        weights: "dealt" or "host".
        ranks: that keep shares.
        resident, dealt: see ParallelConfig.
    """

    weights: str
    ranks: int
    resident: int = 0
    dealt: int = 0

    @classmethod
    def of(cls, config: ParallelConfig, ranks: int) -> Coming | None:
        """As a configuration has them; None where they are on the GPUs."""
        return cls(config.weights, ranks, config.resident, config.dealt) if config.weights in STREAMED else None

    def sizes(self, model: ModelFacts) -> list[int]:
        """Parameters of each block that comes."""
        stay = set(resident_blocks(self.resident, model.blocks))
        return [size for block, size in enumerate(model.block_sizes) if block not in stay]

    def dealt_sizes(self, model: ModelFacts) -> list[int]:
        """Of these, parameters of each block that is dealt out over the GPUs."""
        sizes = self.sizes(model)
        if self.weights == "dealt":
            return sizes
        return [sizes[block] for block in dealt_blocks(self.dealt, len(sizes))]

    def kept_bytes(self, model: ModelFacts) -> int:
        """Bytes of weights on each GPU."""
        sizes = self.sizes(model)
        beside = model.parameters - sum(sizes) + SLOTS * max(sizes, default=0)
        share = -(-sum(self.dealt_sizes(model)) // self.ranks)
        return (beside + share) * model.bytes_per_parameter

    def copies(self, model: ModelFacts, machine: MachineFacts) -> dict[str, tuple[int, LinkFacts]]:
        """Where a GPU copies from in a step, "dealt" or "host": the bytes, and the link that they come over. Of its own
        share it has a copy on the device."""
        dealt = sum(self.dealt_sizes(model)) * model.bytes_per_parameter
        host = sum(self.sizes(model)) * model.bytes_per_parameter - dealt
        found = {"dealt": (dealt - dealt // self.ranks, machine.link), "host": (host, machine.host_link)}
        return {where: found[where] for where, there in (("dealt", dealt), ("host", host)) if there}

    def seconds(self, model: ModelFacts, machine: MachineFacts) -> float:
        """Seconds of a step's copies over their links, one after the other; blocks compute meanwhile."""
        if not machine.on_gpu:
            return 0.0
        return sum(copied / (link.peer * 1e9) for copied, link in self.copies(model, machine).values())
