"""Arguments of ComfyUI's blocks that are neither tensors nor numbers, for one rank's tokens: those of LTX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from .token_split import take

Intervals = Sequence[tuple[int, int]]


def own_object(value: Any, total: int, intervals: Intervals) -> Any:
    """The object for the tokens in `intervals` of `total`; None where it is of no class that is known here.

    Raises:
        ValueError: the object is for another number of tokens.
    """
    cut = _KINDS.get(f"{type(value).__module__}:{type(value).__qualname__}")
    return None if cut is None else cut(value, total, intervals)


def is_guide_mask(value: Any) -> bool:
    """The attention is cut into pieces of queries by what a guide is: each rank may have other pieces."""
    return f"{type(value).__module__}:{type(value).__qualname__}" == _GUIDES


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
_KINDS: dict[str, Callable[[Any, int, Intervals], Any]] = {
    _GUIDES: _guide_mask,
    "comfy.ldm.lightricks.av_model:CompressedTimestep": _timestep,
}
