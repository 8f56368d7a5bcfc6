"""What of a block's arguments belongs to this rank's tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .block_call import BlockCall
from .blocks import Blocks
from .own_objects import own_object
from .streams import Streams
from .token_split import take

Intervals = Sequence[tuple[int, int]]
Joined = dict[Any, tuple[torch.Tensor, torch.Tensor]]
"""(tensor's id, dim, intervals) -> it and its share."""
GRID = 3


class OwnArguments:
    """Cuts the arguments of a call by the data.

    Args:
        unlike: makes the error for an argument that is not as the data says.
    """

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
        """Leave this rank's share in the arguments.

        Args:
            joined: shares that are copies, which the next block may have as they are.
        """
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
                share = shares[stream]
                call[name] = _cut_segments(call[name], share.intervals(), share.total)
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
            try:
                own = own_object(value, total, intervals)
            except ValueError as error:
                raise self._unlike(f"takes as {name} {error}") from error
            if own is None:
                raise self._unlike(f"takes {name_argument(value)} as {name}")
            return own
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


def _cut_segments(segments: Any, intervals: Intervals, length: int) -> list[tuple[Any, ...]]:
    """Those parts of (start, stop, ...) that lie in the intervals, counted from there. A tensor after them may have a
    row for each of its segment's tokens."""
    cut, first = [], 0
    for low, high in intervals:
        for start, stop, *values in segments:
            stop = length if stop is None else stop
            begin, end = max(start, low), min(stop, high)
            if begin < end:
                own = [
                    value[begin - start : end - start]
                    if isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == stop - start
                    else value
                    for value in values
                ]
                cut.append((first + begin - low, first + end - low, *own))
        first += high - low
    return cut
