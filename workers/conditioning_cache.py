"""Which conditionings the pool holds already, so that a text context crosses the socket once a run, not once a step."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from parallel_runtime.errors import RequestError
from parallel_runtime.pipeline.requests import ConditioningRef, Scalar, tensor_name

_CAPACITY = 8


class ConditioningCache:
    """Mirrors the ranks' stores. Compares contents, not identities: ComfyUI concatenates anew for every step."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._kept: OrderedDict[int, dict[str, Any]] = OrderedDict()
        self._to_drop: list[int] = []
        # What is named after what: where a step makes several calls, they come in the same order in the next one.
        self._next: dict[int, int] = {}
        self._last = 0

    def refer(
        self, conditioning: Mapping[str, Any], index: int = 0
    ) -> tuple[ConditioningRef, dict[str, torch.Tensor], tuple[int, ...]]:
        """Return (reference, tensors to send along, numbers that the pool may drop).

        Raises:
            RequestError: an argument of a kind that does not travel, by name.
        """
        arguments = {name: value for name, value in conditioning.items() if value is not None}
        for number, kept in reversed(self._kept.items()):
            if _same(kept, arguments):
                self.use(number)
                return ConditioningRef(number, index=index), {}, self._dropped()
        number = next(self._numbers)
        reference, tensors = _describe(number, arguments, index)
        # Copies: the caller may write into its tensors later, and a comparison with itself would not notice.
        self._kept[number] = {name: _copy(value) for name, value in arguments.items()}
        self.use(number)
        while len(self._kept) > _CAPACITY:
            self._to_drop.append(self._kept.popitem(last=False)[0])
        return reference, tensors, self._dropped()

    def guess(
        self, conditioning: Mapping[str, Any], index: int = 0
    ) -> tuple[ConditioningRef, list[torch.Tensor]] | None:
        """The conditioning that is likely to be this one, and flags of whether they differ; None if there is none.

        To read the flags is left to the caller, who has other things to wait for; and to call `use`, or `refer`, which
        looks at all and keeps what is new.
        """
        number = self._next.get(self._last, self._last)
        if self._to_drop or number not in self._kept:
            return None
        given = {name: value for name, value in conditioning.items() if value is not None}
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        if not _alike(self._kept[number], given, pairs):
            return None
        return ConditioningRef(number, index=index), [_differ(one, other) for one, other in pairs if one is not other]

    def use(self, number: int) -> None:
        """Note that a request names this one."""
        self._kept.move_to_end(number)
        self._next[self._last] = number
        self._last = number

    def clear(self) -> None:
        """Trust none of them any more; the pool drops with the next request what it may still hold."""
        self._to_drop += self._kept
        self._kept.clear()
        self._next.clear()

    def _dropped(self) -> tuple[int, ...]:
        dropped, self._to_drop = tuple(self._to_drop), []
        return dropped


def _describe(number: int, arguments: Mapping[str, Any], index: int) -> tuple[ConditioningRef, dict[str, torch.Tensor]]:
    names: list[str] = []
    lists: dict[str, int] = {}
    constants: dict[str, Scalar] = {}
    tensors: dict[str, torch.Tensor] = {}
    for key, value in arguments.items():
        if isinstance(value, torch.Tensor):
            names.append(key)
            tensors[tensor_name(number, key)] = value
        elif isinstance(value, (list, tuple)) and all(isinstance(item, torch.Tensor) for item in value):
            lists[key] = len(value)
            tensors |= {tensor_name(number, key, i): item for i, item in enumerate(value)}
        elif isinstance(value, (bool, int, float, str)):
            constants[key] = value
        else:
            raise RequestError(
                f"The model's input {key!r} is a {type(value).__name__}, which cannot be sent to the pool.",
                "Remove the node that adds it, or load the model with Load Diffusion Model.",
            )
    return ConditioningRef(number, True, tuple(names), lists, constants, index), tensors


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return [_copy(item) for item in value] if isinstance(value, (list, tuple)) else value


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two conditionings hold the same, bit for bit."""
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    if not _alike(dict(one), dict(other), pairs):
        return False
    on_cpu = [pair for pair in pairs if pair[0].device.type == "cpu"]
    if not all(torch.equal(_bits(one), _bits(other)) for one, other in on_cpu):
        return False
    unlike = [_differ(one, other) for one, other in pairs if one.device.type != "cpu"]
    # One question for all of a GPU's: to ask for each would wait as many times.
    return not unlike or not bool(torch.stack(unlike).any())


def _differ(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A boolean scalar on the tensors' device."""
    if one.device.type == "cpu":
        return torch.tensor(not torch.equal(_bits(one), _bits(other)))
    return torch.ne(_bits(one), _bits(other)).any()


def _alike(one: Any, other: Any, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether two values are equal but for what their tensors hold; those are added to `pairs`."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_alike(value, other[name], pairs) for name, value in one.items())
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor) or (one.dtype, one.shape, one.device) != (
            other.dtype,
            other.shape,
            other.device,
        ):
            return False
        pairs.append((one, other))
        return True
    if isinstance(one, (list, tuple)):
        return (
            isinstance(other, (list, tuple))
            and len(one) == len(other)
            and all(_alike(a, b, pairs) for a, b in zip(one, other, strict=True))
        )
    return type(one) is type(other) and one == other


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as the widest integers they fill: seven times faster to compare than bfloat16, and NaN is NaN."""
    flat = tensor.reshape(-1)
    return flat.view(torch.int64) if flat.nbytes % 8 == 0 else flat.view(torch.uint8)
