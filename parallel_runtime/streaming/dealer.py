"""Deals out the blocks of one model over the ranks, by the kind of weights."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from ..errors import ConfigurationError
from .deal import Deal
from .peer_driver import reach_one_another
from .shared_blocks import SharedBlocks, Streaming


@dataclass(frozen=True)
class Dealer:
    """Deals out the blocks of one model.

    Args:
        key: of the weights; the same on all ranks, and on none for other weights.
        resident: how many blocks stay whole on every rank.
        held: how many of the others this rank keeps, too.
    """

    streaming: Streaming
    key: Hashable
    device: torch.device
    resident: int = 0
    held: int = 0

    def check(self) -> None:
        """Refuse what this machine cannot do, on all ranks alike.

        Raises:
            ConfigurationError: GPUs that cannot read each other's memory.
        """
        if self.streaming.on_device(self.device) and self.streaming.ranks > 1 and not reach_one_another():
            raise ConfigurationError(
                "These GPUs cannot read each other's memory, so that weights cannot be spread over them.",
                "Set weights to host.",
            )

    def deal(self, sizes: Sequence[int]) -> SharedBlocks:
        """What the ranks keep of blocks that have so many bytes; nothing is there yet."""
        return SharedBlocks(self.streaming, Deal(tuple(sizes), self.streaming.ranks), self.key, self.device)

    def device_bytes(self, sizes: Sequence[int]) -> int:
        """What a rank's shares of such blocks take of its device, about."""
        return -(-sum(sizes) // self.streaming.ranks) if self.streaming.on_device(self.device) else 0
