"""Blocks that tell the stream when they run, however they run: as they are, compiled, or while they are recorded."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import nn

from .block_stream import BlockStream


class _Streamed:
    """A block. Its class is what calls of it come through, outside of what is compiled of its forward."""

    _streamed: tuple[BlockStream, int] | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._streamed is None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        stream, number = self._streamed
        stream.before(number)
        returned = super().__call__(*args, **kwargs)  # type: ignore[misc]
        stream.after(number)
        return returned


@functools.cache
def _streamed(plain: type[nn.Module]) -> type[nn.Module]:
    names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
    return type(plain.__name__, (_Streamed, plain), names)


def stream_calls(blocks: Sequence[nn.Module], stream: BlockStream) -> None:
    """Let calls of blocks wait for their weights.

    Args:
        blocks: all, in forward order. Those that stay are of the same class as those that come: torch.compile would
            trace another one anew.
    """
    for block in blocks:
        if not isinstance(block, _Streamed):
            plain: Any = type(block)
            block.__class__ = _streamed(plain)
        block.__dict__["_streamed"] = None
    for number, block in enumerate(stream.coming(blocks)):
        block.__dict__["_streamed"] = (stream, number)


class StreamedForward:
    """The forward of a block of ComfyUI's, which other code may replace and call by itself.

    Args:
        forward: what stands there now.
    """

    def __init__(self, forward: Any, stream: BlockStream, number: int):
        self._forward = forward
        self._stream = stream
        self._number = number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._stream.before(self._number)
        returned = self._forward(*args, **kwargs)
        self._stream.after(self._number)
        return returned


def stream_forwards(blocks: Sequence[nn.Module], stream: BlockStream) -> None:
    """The same for blocks whose forward is an attribute of theirs."""
    for number, block in enumerate(blocks):
        block.forward = StreamedForward(block.forward, stream, number)
