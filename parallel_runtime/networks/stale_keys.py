"""Attention of a patch to the whole latent: its own keys and values are fresh, those of later patches a step old.

Keys and values enter a layer's buffer as they come out of the Ulysses exchange, and what ring attention passes round
is the whole slot. Text runs with the first patch of a step; its keys and values serve the step's other patches too.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass, replace

import torch

from ..attention.kernels import Attend
from ..attention.operators import operator, shapes_of
from .key_slots import Slots

_HOLDERS: weakref.WeakValueDictionary[int, StaleKeys] = weakref.WeakValueDictionary()
"""Live holders by number. An operator of a compiled graph can be given tensors and numbers only; through this table it
finds the buffers, which are another's in every layer though all layers share one graph."""
_numbers = itertools.count()


@dataclass(frozen=True)
class Place:
    """Where the tokens of one forward belong.

    Args:
        call: which of the step's forwards; each has keys of its own.
        slots: the split of the tokens.
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
        self.attends: dict[bool, Attend] = {}
        """With text or without -> attention over the slot: a kernel's, or RingAttention, which goes on from there."""

    @property
    def slot_lengths(self) -> tuple[int, ...]:
        """Keys of every ring rank in the forward at hand."""
        return self.slots(with_text=True).lengths()

    @property
    def buffers(self) -> list[torch.Tensor]:
        """What a recorded forward reads and writes besides its arguments."""
        rows = [row for row in self._rows.values() if isinstance(row, torch.Tensor)]
        return [tensor for layers in self._kept.values() for layer in layers for tensor in layer] + rows

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()
        self._rows.clear()

    def begin(self, place: Place) -> None:
        """A forward begins; its attention layers will come one after the other."""
        self._place, self._layer = place, 0

    def of_image(self) -> ImageKeys:
        """For attention among the image tokens alone."""
        return ImageKeys(self, self._number)

    def slots(self, with_text: bool) -> Slots:
        """The slots of one kind of attention in the forward at hand."""
        assert self._place is not None
        return self._place.slots if with_text else replace(self._place.slots, text=0)

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
        return torch.ops.parallel_dit.stale_attention(query, key, value, scale, self._number, True)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, with_text: bool
    ) -> torch.Tensor:
        """What the operator does: put the fresh keys and values in their place, then attend to all."""
        place, attend = self._place, self.attends[with_text]
        assert place is not None
        layer, self._layer = self._layer, self._layer + 1
        if not place.keep:
            return attend(query, key, value, None, scale)
        kept = self._kept.setdefault(place.call, [])
        if layer == len(kept):
            kept.append((self._buffer(key, with_text), self._buffer(value, with_text)))
        keys, values = kept[layer]
        rows = self._where(key.device, with_text)
        keys[:, rows] = key
        values[:, rows] = value
        return attend(query, keys, values, None, scale)

    def _buffer(self, like: torch.Tensor, with_text: bool) -> torch.Tensor:
        assert self._place is not None
        assert self._place.patch is None, "the first step of a run is synchronous"
        batch, _, heads, head_dim = like.shape
        length = self.slots(with_text).lengths()[self._place.ring]
        return like.new_empty(batch, length, heads, head_dim)

    def _where(self, device: torch.device, with_text: bool) -> slice | torch.Tensor:
        assert self._place is not None
        slots = self.slots(with_text)
        key = (slots, self._place.ring, self._place.patch, self._place.with_text and with_text)
        if key not in self._rows:
            rows = slots.rows(*key[1:])
            low = rows[0]
            in_order = rows == list(range(low, low + len(rows)))
            self._rows[key] = slice(low, low + len(rows)) if in_order else torch.tensor(rows, device=device)
        return self._rows[key]


class ImageKeys:
    """`StaleKeys` for attention among the image tokens alone."""

    def __init__(self, keys: StaleKeys, number: int):
        self._keys = keys
        self._number = number

    @property
    def slot_lengths(self) -> tuple[int, ...]:
        """Keys of every ring rank in the forward at hand."""
        return self._keys.slots(with_text=False).lengths()

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        """See `StaleKeys`."""
        assert mask is None, "a masked attention among those of a stage"
        return torch.ops.parallel_dit.stale_attention(query, key, value, scale, self._number, False)


@operator(
    "stale_attention", "(Tensor query, Tensor key, Tensor value, float? scale, int holder, bool with_text) -> Tensor"
)
def _stale_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, holder: int, with_text: bool
) -> torch.Tensor:
    """StaleKeys.attend, opaque to torch.compile: which layer it is would otherwise make a graph for each."""
    return _HOLDERS[holder].attend(query, key, value, scale, with_text).contiguous()


@shapes_of(_stale_attention)
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, holder: int, with_text: bool
) -> torch.Tensor:
    return query.new_empty(query.shape)
