"""Arguments of one call of a block: by the names that the data uses, and what of them belongs to this rank's tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import cache
from typing import Any

import torch

from .shares import Streams
from .tables.blocks import Blocks
from .token_split import take

KEYWORD = inspect.Parameter.VAR_KEYWORD


class BlockCall:
    """Reads and replaces arguments; what comes out of `args` and `kwargs` is the call as it is then. `positional` are
    names for *args, in a signature that has nothing else (Blocks.positional)."""

    def __init__(
        self, signature: inspect.Signature, positional: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
    ):
        self._bound = signature.bind(*args, **kwargs)
        self._bound.apply_defaults()
        kinds = {each.kind: each.name for each in signature.parameters.values()}
        given = self._bound.arguments
        self._others: dict[str, Any] = given[kinds[KEYWORD]] if KEYWORD in kinds else {}
        self._list = kinds.get(inspect.Parameter.VAR_POSITIONAL, "")
        self._listed = dict(zip(positional, given[self._list], strict=True)) if self._list else {}

    @property
    def others(self) -> set[str]:
        """Names of arguments that the signature does not name, and that have a value."""
        return {name for name, value in self._others.items() if value is not None}

    @property
    def args(self) -> tuple[Any, ...]:
        """Positional arguments."""
        return tuple(self._listed.values()) if self._list else self._bound.args

    @property
    def kwargs(self) -> dict[str, Any]:
        """Arguments by name."""
        return self._bound.kwargs

    def _holder(self, base: str) -> MutableMapping[str, Any]:
        return next((each for each in (self._listed, self._others) if base in each), self._bound.arguments)

    def __getitem__(self, name: str) -> Any:
        base, _, item = name.partition(".")
        value = self._holder(base).get(base)
        return value[int(item)] if item and value is not None else value

    def __setitem__(self, name: str, value: Any) -> None:
        base, _, item = name.partition(".")
        holder = self._holder(base)
        if item:
            items = list(holder[base])
            items[int(item)] = value
            value = type(holder[base])(items)
        if base in holder:
            holder[base] = value


Intervals = Sequence[tuple[int, int]]


def is_guide_mask(value: Any) -> bool:
    """The attention is cut into pieces of queries by what a guide is: each rank may have other pieces."""
    return _kind(value) == _GUIDES


def _kind(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def _guide_mask(mask: Any, total: int, intervals: Intervals) -> Any:
    """Biases of own queries over the keys of all ranks."""
    if mask.noisy_mask.shape[3] != total:
        raise ValueError(f"guides of {mask.noisy_mask.shape[3]} tokens, where there are {total}")
    start, stop = intervals[0]
    first, last = mask.guide_start, mask.guide_start + mask.tracked_count
    begin, end = (min(max(each, start), stop) for each in (first, last))
    own = object.__new__(type(mask))
    own.guide_start, own.tracked_count = begin - start, end - begin
    own.noisy_mask = mask.noisy_mask
    own.tracked_mask = mask.tracked_mask[:, :, min(begin, last) - first :][:, :, : end - begin]
    return own


def _timestep(value: Any, total: int, intervals: Intervals) -> Any:
    """One row for each frame, of the frames that own tokens are of."""
    frames, tokens = value.num_frames, value.patches_per_frame
    if frames * tokens == 1:  # one for all
        return value
    if frames * tokens != total:
        raise ValueError(f"timesteps of {frames} frames of {tokens} tokens, where there are {total} tokens")
    start, stop = intervals[0]
    first, last = start // tokens, -(-stop // tokens)
    kind: Any = type(value)
    own = object.__new__(_own_timestep(kind))
    for name in kind.__slots__:
        setattr(own, name, getattr(value, name))
    own.data, own.num_frames = value.data[:, first:last], last - first
    own.intervals = [(start - first * tokens, stop - first * tokens)]
    return own


@cache
def _own_timestep(kind: Any) -> Any:
    class OwnTimestep(kind):
        __slots__ = ("intervals",)

        def expand(self) -> Any:
            return take(super().expand(), 1, self.intervals)

        def expand_for_computation(self, *args: Any, **kwargs: Any) -> Any:
            return tuple(take(each, 1, self.intervals) for each in super().expand_for_computation(*args, **kwargs))

    return OwnTimestep


_GUIDES = "comfy.ldm.lightricks.model:GuideAttentionMask"
_OWN_OBJECT: Mapping[str, Callable[[Any, int, Intervals], Any]] = {
    _GUIDES: _guide_mask,
    "comfy.ldm.lightricks.av_model:CompressedTimestep": _timestep,
}
"""Class -> what makes the object for the tokens in the intervals, of so many; ValueError for another number."""
Joined = dict[Any, tuple[torch.Tensor, torch.Tensor]]  # (tensor's id, dim, intervals) -> it and its share
GRID = 3


class OwnArguments:
    """Cuts the arguments of a call by the data; `unlike` makes the error for one that is not as the data says."""

    def __init__(self, blocks: Blocks, unlike: Callable[[str], Exception]):
        self._blocks = blocks
        self._unlike = unlike

    def tokens(self, call: BlockCall) -> dict[str, torch.Tensor]:
        """The token arguments, whole, with their tokens on one dim."""
        found = {}
        for name, dim in self._blocks.tokens.items():
            value = call[name]
            dims = GRID if name in self._blocks.grids else 1
            if not isinstance(value, torch.Tensor) or value.ndim < dim + dims:
                raise self._unlike(f"takes {name_argument(value)} as {name}")
            found[name] = value.flatten(dim, dim + dims - 1)
        return found

    def cut(self, call: BlockCall, whole: Mapping[str, torch.Tensor], streams: Streams, joined: Joined) -> None:
        """Leave this rank's share in the arguments; `joined` are copies that the next block may have as they are."""
        blocks = self._blocks
        joint = streams.intervals()
        shares = {name: streams.only(index) for index, name in enumerate(whole)}
        for name, dim in blocks.tokens.items():
            own = take(whole[name], dim, shares[name].intervals()).contiguous()
            call[name] = _as_grid(own, dim) if name in blocks.grids else own
        for name, dim in blocks.joint.items():
            call[name] = self._joint(call[name], name, dim, joint, streams.total, joined)
        for name, (stream, dim) in blocks.rows.items():
            call[name] = self._rows(call[name], name, dim, shares[stream])
        for name, stream in blocks.segments.items():
            if call[name] is not None:
                call[name] = _cut_segments(call[name], shares[stream])
        for name, stream in blocks.border.items():
            if call[name] is not None:
                start, stop = shares[stream].intervals()[0]
                call[name] = min(max(call[name], start), stop) - start

    def _joint(self, value: Any, name: str, dim: int, intervals: Intervals, total: int, joined: Joined) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(self._joint(item, name, dim, intervals, total, joined) for item in value)
        if not isinstance(value, torch.Tensor) or value.shape[dim] == 1:
            return value
        if value.shape[dim] != total:
            raise self._unlike(f"takes {name_argument(value)} as {name} of {total} tokens")
        dim %= value.ndim
        if len(intervals) == 1:
            return take(value, dim, intervals)
        key = id(value), dim, tuple(intervals)  # of a tensor that lives as long as this
        if key not in joined:
            joined[key] = value, take(value, dim, intervals)
        return joined[key][1]

    def _rows(self, value: Any, name: str, dim: int, share: Streams) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(self._rows(item, name, dim, share) for item in value)
        if value is None or isinstance(value, (int, float)):
            return value
        intervals, total = share.intervals(), share.total
        if not isinstance(value, torch.Tensor):
            if (own_object := _OWN_OBJECT.get(_kind(value))) is None:
                raise self._unlike(f"takes {name_argument(value)} as {name}")
            try:
                return own_object(value, total, intervals)
            except ValueError as error:
                raise self._unlike(f"takes as {name} {error}") from error
        if name in self._blocks.grids:
            return _as_grid(take(value.flatten(dim, dim + GRID - 1), dim, intervals), dim)
        if value.ndim <= dim or value.shape[dim] == 1:
            return value
        rows = value.shape[dim]
        if total % rows and not (name in self._blocks.stretched and rows < total):
            raise self._unlike(f"takes {name_argument(value)} as {name} of {total} tokens")
        if rows != total:
            value = value.repeat_interleave(-(-total // rows), dim)
        return take(value, dim, intervals)


def name_argument(value: Any) -> str:
    """What an argument is, in words."""
    return f"a tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _as_grid(tokens: torch.Tensor, dim: int) -> torch.Tensor:
    """Tokens on one dim as a grid of one row and one column: its frames are the tokens."""
    return tokens.unsqueeze(dim + 1).unsqueeze(dim + 1)


def _cut_segments(segments: Any, share: Streams) -> list[tuple[Any, ...]]:
    """Parts of (start, stop, ...) in a stream's share, counted from there; a tensor behind may have a row per token."""
    low, high = share.intervals()[0]
    cut = []
    for start, stop, *values in segments:
        stop = share.total if stop is None else stop
        begin, end = max(start, low), min(stop, high)
        if begin < end:
            by_token = [isinstance(each, torch.Tensor) and each.shape[:1] == (stop - start,) for each in values]
            rows = slice(begin - start, end - start)
            own = [each[rows] if has_rows else each for each, has_rows in zip(values, by_token, strict=True)]
            cut.append((begin - low, end - low, *own))
    return cut
