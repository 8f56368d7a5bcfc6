"""Deals out the blocks of one model over the ranks, by the kind of weights."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch

from ..errors import ConfigurationError
from ..switches import is_on
from .deal import Deal, dealt_blocks
from .mixed_blocks import MixedBlocks
from .peer_driver import reach_one_another
from .shared_blocks import SharedBlocks, Streaming


@dataclass(frozen=True)
class Dealer:
    """Deals out the blocks of one model.

    Args:
        key: of the weights; the same on all ranks, and on none for other weights.
        resident: how many blocks stay whole on every rank.
        dealt: with weights in the host's memory, how many blocks are dealt out over the devices all the same.
    """

    streaming: Streaming
    key: Hashable
    device: torch.device
    resident: int = 0
    dealt: int = 0

    def check(self) -> None:
        """Refuse what this machine cannot do, on all ranks alike.

        Raises:
            ConfigurationError: GPUs that cannot read each other's memory.
        """
        shares = self._over_devices.on_device(self.device) and (self.dealt or self.streaming.mode == "dealt")
        if shares and self.streaming.ranks > 1 and not reach_one_another():
            raise ConfigurationError(
                "These GPUs cannot read each other's memory, so that weights cannot be dealt out to them.",
                "Set weights to host.",
            )

    def deal(self, sizes: Sequence[int]) -> SharedBlocks | MixedBlocks:
        """What the ranks keep of blocks that have so many bytes; nothing is there yet."""
        over = self._dealt(sizes)
        if self.streaming.mode == "dealt" or not over:
            return self._shared(self.streaming, sizes, self.key)
        dealt = self._shared(self._over_devices, [sizes[block] for block in over], (self.key, "dealt"))
        rest = [size for block, size in enumerate(sizes) if block not in over]
        return MixedBlocks(dealt, self._shared(self.streaming, rest, (self.key, "host")), over, len(sizes))

    def device_bytes(self, sizes: Sequence[int]) -> int:
        """What a rank's shares of such blocks take of its device, about."""
        if not self._over_devices.on_device(self.device):
            return 0
        return -(-sum(sizes[block] for block in self._dealt(sizes)) // self.streaming.ranks)

    @property
    def _over_devices(self) -> Streaming:
        return replace(self.streaming, mode="dealt")

    def _dealt(self, sizes: Sequence[int]) -> Sequence[int]:
        return range(len(sizes)) if self.streaming.mode == "dealt" else dealt_blocks(self.dealt, len(sizes))

    def _shared(self, streaming: Streaming, sizes: Sequence[int], key: Hashable) -> SharedBlocks:
        return SharedBlocks(streaming, Deal(tuple(sizes), streaming.ranks), key, self.device)


def may_mix(device: torch.device) -> bool:
    """Whether blocks may be dealt out over the devices while others come from the host; the same on all ranks."""
    return is_on("mixed") and (device.type != "cuda" or reach_one_another())
