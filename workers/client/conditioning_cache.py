"""Which conditionings the pool holds already, so that a text context crosses the socket once a run, not once a step."""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from parallel_runtime.errors import RequestError
from parallel_runtime.requests.conditioning import Shared
from parallel_runtime.requests.patches import Patch
from parallel_runtime.requests.requests import ConditioningRef, Scalar, tensor_name
from parallel_runtime.requests.trees import flatten, place_of
from parallel_runtime.said import said

_CAPACITY = 8
_TRUSTED_AFTER = 2
"""So often the very same tensors must have been found equal: one that is written into at each step never gets there."""
_WIDTHS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@dataclass
class _Kept:
    """A conditioning: what can be compared without looking into its tensors, and their bytes; see `_contents`.

    Args:
        met: the caller's tensors that were found equal last.
        times: how often one after the other these were.
    """

    form: Any
    contents: list[torch.Tensor]
    met: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    times: int = 0

    def is_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are the tensors that were met last: not by their addresses, which those of the next run have,
        too."""
        met = zip(self.met, tensors, strict=False)
        return len(self.met) == len(tensors) and all(before() is now for before, now in met)

    def meet(self, tensors: Sequence[torch.Tensor]) -> None:
        """These were found equal."""
        self.times = self.times + 1 if self.is_of(tensors) else 1
        self.met = [weakref.ref(tensor) for tensor in tensors]


@dataclass(frozen=True)
class Guess:
    """A conditioning that the pool holds, and that a call's is likely to be.

    Args:
        trusted: the call's tensors are those which were found equal the last times: so likely that the ranks may begin
            before it is known.
        unlike: launches the comparison; flags, on the tensors' devices, of whether they differ.
        settle: to be told which it was.
    """

    reference: ConditioningRef
    trusted: bool
    unlike: Callable[[], list[torch.Tensor]]
    settle: Callable[[bool], None]


class Scratch:
    """Memory that is kept from call to call, one tensor for each device and dtype: to compare takes a tensor of the
    size of the conditioning, at every step.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def take(self, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor (length,), with anything in it; the next one taken may be the same."""
        kept = self._kept.get((device, dtype))
        if kept is None or kept.numel() != length:
            with torch.inference_mode(False):  # the next call may be outside of it, and could not write to it
                kept = self._kept[device, dtype] = torch.empty(length, dtype=dtype, device=device)
        return kept


class ConditioningCache:
    """Mirrors the ranks' stores. Compares contents, not identities: ComfyUI concatenates anew for every step."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._to_drop: list[int] = []
        # What is named after what: where a step makes several calls, they come in the same order in the next one.
        self._next: dict[int, int] = {}
        self._last = 0
        self._scratch = Scratch()

    def refer(
        self, conditioning: Mapping[str, Any], index: int = 0
    ) -> tuple[ConditioningRef, dict[str, torch.Tensor], tuple[int, ...]]:
        """Return (reference, tensors to send along, numbers that the pool may drop).

        Raises:
            RequestError: an argument of a kind that does not travel, by name.
        """
        arguments = {name: value for name, value in conditioning.items() if value is not None}
        tensors: list[torch.Tensor] = []
        form = _form(arguments, tensors)
        contents = _contents(tensors, self._scratch)
        for number, kept in reversed(self._kept.items()):
            if kept.form == form and _same(kept.contents, contents, self._scratch):
                self.use(number)
                return ConditioningRef(number, index=index), {}, self._dropped()
        number = next(self._numbers)
        reference, sent = _describe(number, arguments, index)
        # Copies: the caller may write into its tensors later, and a comparison with itself would not notice.
        self._kept[number] = _Kept(form, [content.clone() for content in contents])
        self.use(number)
        while len(self._kept) > _CAPACITY:
            self._to_drop.append(self._kept.popitem(last=False)[0])
        return reference, sent, self._dropped()

    def guess(self, conditioning: Mapping[str, Any], index: int = 0) -> Guess | None:
        """The conditioning that is likely to be this one; None if there is none.

        To compare them is left to the caller, who has other things to wait for; and where it is another one to call
        `refer`, which looks at all and keeps what is new.
        """
        number = self._next.get(self._last, self._last)
        kept = self._kept.get(number)
        if self._to_drop or kept is None:
            return None
        tensors: list[torch.Tensor] = []
        if _form({name: value for name, value in conditioning.items() if value is not None}, tensors) != kept.form:
            return None

        def unlike() -> list[torch.Tensor]:
            pairs = zip(kept.contents, _contents(tensors, self._scratch), strict=True)
            return [_differ(one, other, self._scratch) for one, other in pairs]

        def settle(right: bool) -> None:
            if right:
                kept.meet(tensors)
                self.use(number)
            else:
                kept.times = 0

        trusted = kept.times >= _TRUSTED_AFTER and kept.is_of(tensors)
        return Guess(ConditioningRef(number, index=index), trusted, unlike, settle)

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
    trees: dict[str, Any] = {}
    shared = tuple(key for key, value in arguments.items() if isinstance(value, Shared))
    tensors: dict[str, torch.Tensor] = {}
    for key, given in arguments.items():
        value = given.value if isinstance(given, Shared) else given
        if isinstance(value, torch.Tensor):
            names.append(key)
            tensors[tensor_name(number, key)] = value
        elif isinstance(value, (list, tuple)) and all(isinstance(item, torch.Tensor) for item in value):
            lists[key] = len(value)
            tensors |= {tensor_name(number, key, i): item for i, item in enumerate(value)}
        elif isinstance(value, (bool, int, float, str)):
            constants[key] = value
        else:
            inside: list[torch.Tensor] = []
            try:
                trees[key] = flatten(value, inside)
            except TypeError as error:
                raise RequestError(
                    said(
                        "The model's input {key} is or holds {error}, which cannot be sent to the pool.",
                        key=repr(key),
                        error=error,
                    ),
                    "Remove the node that adds it, or load the model with Load Diffusion Model.",
                ) from error
            lists[key] = len(inside)
            tensors |= {tensor_name(number, key, i): item for i, item in enumerate(inside)}
    reference = ConditioningRef(
        number,
        new=True,
        tensors=tuple(names),
        lists=lists,
        constants=constants,
        trees=trees,
        shared=shared,
        index=index,
    )
    return reference, tensors


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


def _contents(tensors: Sequence[torch.Tensor], scratch: Scratch) -> list[torch.Tensor]:
    """The bytes of tensors, as integers, good until the next call: of one form always as many tensors, of the same
    shapes.

    Those on a GPU are joined, as each comparison there costs the host more than the GPU.
    """
    contents: list[torch.Tensor] = []
    on_gpu: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.device.type == "cpu":
            contents.append(joined([tensor], scratch))
        else:
            on_gpu.setdefault(tensor.device, []).append(tensor)
    return contents + [joined(alike, scratch) for alike in on_gpu.values()]


def joined(tensors: Sequence[torch.Tensor], scratch: Scratch) -> torch.Tensor:
    """The bytes of tensors of one device as (N,) integers, the widest that fit: seven times faster to compare than
    bfloat16, and NaN is NaN. A view where there is one tensor."""
    width = next(dtype for dtype in _WIDTHS if all(tensor.nbytes % dtype.itemsize == 0 for tensor in tensors))
    flat = [tensor.reshape(-1) for tensor in tensors]
    flat = [part.clone() if part.storage_offset() * part.itemsize % width.itemsize else part for part in flat]
    parts = [part.view(width) for part in flat]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, out=scratch.take(sum(part.numel() for part in parts), width, parts[0].device))


def _same(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor], scratch: Scratch) -> bool:
    """Whether all hold the same, bit for bit."""
    pairs = list(zip(ones, others, strict=True))
    if not all(torch.equal(one, other) for one, other in pairs if one.device.type == "cpu"):
        return False
    unlike = [_differ(one, other, scratch) for one, other in pairs if one.device.type != "cpu"]
    # One question for all of a GPU's: to ask for each would wait as many times.
    return not unlike or not bool(torch.stack(unlike).any())


def _differ(one: torch.Tensor, other: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """A boolean scalar on the tensors' device."""
    if one.device.type == "cpu":
        return torch.tensor(not torch.equal(one, other))
    return torch.ne(one, other, out=scratch.take(one.numel(), torch.bool, one.device)).any()
