"""Which conditionings the pool holds already, so that a text context crosses the socket once a run, not once a step."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from parallel_runtime.errors import RequestError
from parallel_runtime.requests.conditioning import Shared
from parallel_runtime.requests.patches import Patch
from parallel_runtime.requests.requests import ConditioningRef, tensor_name
from parallel_runtime.requests.trees import flatten, place_of
from parallel_runtime.said import said

from .mirror import Mirror

_CAPACITY = 8
_WIDTHS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@dataclass(frozen=True)
class _Kept:
    """A conditioning: what can be compared without looking into its tensors, and copies of these."""

    form: Any
    tensors: list[torch.Tensor]


class ConditioningCache:
    """Compares contents, not identities: ComfyUI concatenates anew for every step."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._mirror: Mirror[int, _Kept] = Mirror(_CAPACITY)

    def refer(
        self, conditioning: Mapping[str, Any], index: int = 0
    ) -> tuple[ConditioningRef, dict[str, torch.Tensor], tuple[int, ...]]:
        """Return (reference, tensors to send along, numbers to drop); RequestError for what does not travel."""
        arguments = {name: value for name, value in conditioning.items() if value is not None}
        tensors: list[torch.Tensor] = []
        form = _form(arguments, tensors)
        number = self._mirror.find(lambda kept: kept.form == form and all(map(_same, kept.tensors, tensors)))
        if number is not None:
            return ConditioningRef(number, index=index), {}, self._mirror.untold()
        number = next(self._numbers)
        reference, sent = _describe(number, arguments, index)
        # Copies: the caller may write into its tensors later, and a comparison with itself would not notice.
        self._mirror.hold(number, _Kept(form, [tensor.clone() for tensor in tensors]))
        return reference, sent, self._mirror.untold()

    def clear(self) -> None:
        """Trust none of them any more; the pool drops with the next request what it may still hold."""
        self._mirror.doubt()


def _describe(number: int, arguments: Mapping[str, Any], index: int) -> tuple[ConditioningRef, dict[str, torch.Tensor]]:
    names: list[str] = []
    trees: dict[str, Any] = {}
    counts: dict[str, int] = {}
    tensors: dict[str, torch.Tensor] = {}
    for key, given in arguments.items():
        value = given.value if isinstance(given, Shared) else given
        if isinstance(value, torch.Tensor):
            names.append(key)
            tensors[tensor_name(number, key)] = value
            continue
        inside: list[torch.Tensor] = []
        try:
            trees[key] = flatten(value, inside)
        except TypeError as error:
            template = "The model's input {key} is or holds {error}, which cannot be sent to the workers."
            fix = "Remove the node that adds it, or load the model with Load Diffusion Model."
            raise RequestError(said(template, key=repr(key), error=error), fix) from error
        counts[key] = len(inside)
        tensors |= {tensor_name(number, key, place): each for place, each in enumerate(inside)}
    shared = tuple(key for key, value in arguments.items() if isinstance(value, Shared))
    return ConditioningRef(number, True, tuple(names), trees, counts, shared, index), tensors


def _form(value: Any, tensors: list[torch.Tensor]) -> Any:
    """What two values have in common that are equal but for what their tensors hold; those are added to `tensors`."""
    if isinstance(value, torch.Tensor):
        known = len(tensors)
        place = place_of(value, tensors)
        return value.dtype, value.shape, value.device, place - known  # one that is there twice, as such
    if isinstance(value, Patch):
        return value.code, value.number, value.kept, _form(dict(value.values), tensors)
    if isinstance(value, Shared):
        return Shared(_form(value.value, tensors))
    if isinstance(value, dict):
        return {name: _form(item, tensors) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_form(item, tensors) for item in value]
    return type(value), value


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
