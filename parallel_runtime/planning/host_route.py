"""What is seen of one block's exchange through the host's memory (exchange/host_exchange.py)."""

from __future__ import annotations

from dataclasses import dataclass

from . import cost_constants as fitted


@dataclass(frozen=True)
class OnRoute:
    """An exchange that moves queries, keys, values and attended values for so many seconds, and what a rank computes
    meanwhile, in seconds: attention, what makes queries, keys and values, and a feed-forward layer beside attention."""

    moved: float
    attention: float
    made: float = 0.0
    beside: float = 0.0

    @property
    def shown(self) -> float:
        """Behind attention alone."""
        return self.moved - min(self.moved, self.attention) * (1 - fitted.SEEN_OF_EXCHANGE)

    @property
    def projected(self) -> float:
        """Where heads are made on the way."""
        return self._behind(self.attention + self.made * fitted.MADE_MEANWHILE)

    @property
    def parallel(self) -> float:
        """With the layer beside attention, too."""
        return self._behind(self.attention + self.made * fitted.MADE_MEANWHILE + self.beside)

    def of_inputs(self, width: float) -> float:
        """Of two ranks that send inputs instead, of numbers so wide against those that are computed."""
        comes, leaves = self.moved / 2 * width, self.moved / 4
        behind = max(0.0, comes - self.made * (1 - fitted.LAST_OF_INPUT))
        return behind + leaves - min(leaves, self.attention) * (1 - fitted.SEEN_OF_EXCHANGE)

    def _behind(self, computed: float) -> float:
        return min(self.shown, max(fitted.SEEN_BESIDE * self.moved, self.moved - computed))
