"""What the ranks hold already: a text context crosses the socket once a run, not once a step."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from parallel_runtime.requests.conditioning import refer
from parallel_runtime.requests.requests import ConditioningRef

Known = TypeVar("Known")

_CAPACITY = 8
_WIDTHS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class Mirror(Generic[Known]):
    """Numbers of things that the ranks hold, in the order of their last use, and what this side knows of each.

    A request that brings another one names all that stay, so that the ranks hold no others: what is not certain after
    a failure just counts as not held.

    Args:
        most: where there are more, the one that was used longest ago goes.
    """

    def __init__(self, most: int):
        self._held: OrderedDict[int, Known] = OrderedDict()
        self._most = most

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of all that are held, the one that was used longest ago first."""
        return tuple(self._held)

    def find(self, fits: Callable[[Known], bool]) -> int | None:
        """The number of the last used one that fits, which is used now; None where none does."""
        for number, known in reversed(self._held.items()):
            if fits(known):
                self._held.move_to_end(number)
                return number
        return None

    def hold(self, number: int, known: Known) -> None:
        """The ranks hold it from now on, or use it again."""
        self._held[number] = known
        self._held.move_to_end(number)
        if len(self._held) > self._most:
            self._held.popitem(last=False)

    def clear(self) -> None:
        """Count on none any more."""
        self._held.clear()


@dataclass(frozen=True)
class _Kept:
    """A conditioning: what can be compared without looking into its tensors, and copies of these."""

    form: str
    tensors: list[torch.Tensor]


class ConditioningCache(Mirror[_Kept]):
    """Compares contents, not identities: ComfyUI concatenates anew for every step."""

    def __init__(self) -> None:
        super().__init__(_CAPACITY)
        self._next = itertools.count(1)

    def refer(self, conditioning: Mapping[str, Any], index: int = 0) -> tuple[ConditioningRef, dict[str, torch.Tensor]]:
        """Return (reference, tensors to send along); RequestError for what does not travel."""
        arguments = {name: value for name, value in conditioning.items() if value is not None}
        reference, named = refer(next(self._next), arguments, index)
        tensors = list(named.values())
        form = repr((reference.trees, reference.shared, [(each.dtype, each.shape, each.device) for each in tensors]))
        number = self.find(lambda kept: kept.form == form and all(map(_same, kept.tensors, tensors)))
        if number is not None:
            return ConditioningRef(number, index=index), {}
        # Copies: the caller may write into its tensors later, and a comparison with itself would not notice.
        self.hold(reference.id, _Kept(form, [tensor.clone() for tensor in tensors]))
        return reference, named


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one form hold the same, bit for bit: as the widest integers that fit both, which are seven
    times faster to compare than bfloat16, and NaN is NaN."""
    flat = one.reshape(-1), other.reshape(-1)
    width = next(
        dtype
        for dtype in _WIDTHS
        if not any(each.nbytes % dtype.itemsize or each.data_ptr() % dtype.itemsize for each in flat)
    )
    return torch.equal(flat[0].view(width), flat[1].view(width))
