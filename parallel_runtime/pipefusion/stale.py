"""Attention of a patch to the whole latent: its own keys and values are fresh, those of later patches a step old.

Keys and values enter a layer's buffer as they come out of the Ulysses exchange, and what ring attention passes round
is the whole slot. Text runs with the first patch of a step; its keys and values serve the step's other patches too.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass

import torch

from ..attention.kernels import Attend
from .slots import Slots

_HOLDERS: weakref.WeakValueDictionary[int, StaleKeys] = weakref.WeakValueDictionary()
"""Live holders by number. An operator of a compiled graph can be given tensors and numbers only; through this table it
finds the buffers, which are another's in every layer though all layers share one graph."""
_numbers = itertools.count()


@dataclass(frozen=True)
class Place:
    """Where the tokens of one forward belong.

    Args:
        call: which of the step's forwards; each has keys of its own.
        slots: the deal of the tokens.
        ring: whose slot, this rank's index on the ring axis.
        patch: None when all patches come.
        with_text: whether text tokens are among them.
        keep: False where no later forward will read them.
    """

    call: int
    slots: Slots
    ring: int
    patch: int | None
    with_text: bool
    keep: bool


class StaleKeys:
    """The keys and values that a stage keeps; stands between the Ulysses exchange and the kernel."""

    def __init__(self) -> None:
        self._number = next(_numbers)
        _HOLDERS[self._number] = self
        self._kept: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._rows: dict[tuple[Slots, int, int | None, bool], slice | torch.Tensor] = {}
        self._layer = 0
        self._place: Place | None = None
        self._attend: Attend | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(key.nbytes + value.nbytes for layers in self._kept.values() for key, value in layers)

    @property
    def slot_lengths(self) -> tuple[int, ...]:
        """Keys of every ring rank in the forward at hand."""
        assert self._place is not None
        return self._place.slots.lengths()

    def clear(self) -> None:
        """Forget all: the run is over."""
        self._kept.clear()
        self._rows.clear()

    def begin(self, place: Place, attend: Attend) -> None:
        """A forward begins; its attention layers will come one after the other.

        Args:
            attend: over the slot: a kernel's, or RingAttention, which goes on to the other slots.
        """
        self._place, self._attend, self._layer = place, attend, 0

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Attend with the queries that came to the whole slot; (batch, tokens, heads, head dim), no mask."""
        assert mask is None, "a masked attention among those of a stage"
        return torch.ops.parallel_dit.stale_attention(query, key, value, scale, self._number)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
        """What the operator does: put the fresh keys and values in their place, then attend to all."""
        place, attend = self._place, self._attend
        assert place is not None
        assert attend is not None
        layer, self._layer = self._layer, self._layer + 1
        if not place.keep:
            return attend(query, key, value, None, scale)
        kept = self._kept.setdefault(place.call, [])
        if layer == len(kept):
            kept.append((self._buffer(key), self._buffer(value)))
        keys, values = kept[layer]
        rows = self._where(key.device)
        keys[:, rows] = key
        values[:, rows] = value
        return attend(query, keys, values, None, scale)

    def _buffer(self, like: torch.Tensor) -> torch.Tensor:
        assert self._place is not None
        assert self._place.patch is None, "the first step of a run is synchronous"
        batch, _, heads, head_dim = like.shape
        length = self._place.slots.lengths()[self._place.ring]
        return like.new_empty(batch, length, heads, head_dim)

    def _where(self, device: torch.device) -> slice | torch.Tensor:
        assert self._place is not None
        key = (self._place.slots, self._place.ring, self._place.patch, self._place.with_text)
        if key not in self._rows:
            rows = self._place.slots.rows(*key[1:])
            low = rows[0]
            in_order = rows == list(range(low, low + len(rows)))
            self._rows[key] = slice(low, low + len(rows)) if in_order else torch.tensor(rows, device=device)
        return self._rows[key]


@torch.library.custom_op("parallel_dit::stale_attention", mutates_args=())
def _stale_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, holder: int
) -> torch.Tensor:
    """StaleKeys.attend, opaque to torch.compile: which layer it is would otherwise make a graph for each."""
    return _HOLDERS[holder].attend(query, key, value, scale).contiguous()


@_stale_attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, holder: int) -> torch.Tensor:
    return query.new_empty(query.shape)
