"""Frames on a socket: prefix, msgpack header, raw tensor bytes. No pickle, every length capped before it is believed.

    magic 4 | version 2 | header bytes 4 | payload bytes 8 | header | payload

The payload has all bytes of the header's tensors, or none: they go to rank 0 alone, or lie in shared memory."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from parallel_runtime.errors import PoolError
from parallel_runtime.said import Said

from .protocol import VERSION, Message, TensorSpec

PREFIX = struct.Struct("!4sHIQ")
MAGIC = b"PDiT"
MAX_HEADER = 1 << 20
MAX_PAYLOAD = 1 << 33
MAX_TENSORS = 4096
MAX_DIMS = 16
_CLOSED = "The connection was closed; the next prompt starts fresh workers."

ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "int32": 4, "int64": 8, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
}  # fmt: skip
"""Tensor types that may travel, by torch's names, and the bytes of one element."""


def _to_data(value: object) -> Any:
    if isinstance(value, Said):
        return value.to_data()
    raise NotImplementedError(f"{type(value).__name__} does not travel")


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_data)
_decoder = msgspec.msgpack.Decoder(Message, dec_hook=lambda _, data: Said.from_data(data))  # no other type needs it


class FrameError(PoolError):
    """Bytes that are no frame of ours: another program, another version, or damage."""

    def __init__(self, cause: str, fix: str = _CLOSED, **values: object):
        super().__init__(cause, fix, **values)


@dataclass(frozen=True)
class Frame:
    """A received frame. `header` is kept raw so that it can be passed on as it came."""

    message: Message
    header: bytes
    payload: memoryview | None


def tensor_bytes(spec: TensorSpec) -> int:
    """Bytes of one tensor; FrameError where its type may not travel, or its dimensions are no shape."""
    if spec.dtype not in ITEM_BYTES:
        raise FrameError(f"Tensor {spec.name!r} has type {spec.dtype!r}, which does not travel.")
    if len(spec.shape) > MAX_DIMS or any(dim < 0 for dim in spec.shape):
        raise FrameError(f"Tensor {spec.name!r} has no valid shape.")
    return ITEM_BYTES[spec.dtype] * math.prod(spec.shape)


def encode_header(message: Message) -> bytes:
    """The header's bytes; FrameError where they are more than the receiver accepts."""
    header = _encoder.encode(message)
    if len(header) > MAX_HEADER:
        what = "A message of {size} bytes is longer than the {cap} that travel."
        fix = "It was not sent, and the workers go on. Queue a smaller part of the workflow, and please report it."
        raise FrameError(what, fix, size=len(header), cap=MAX_HEADER)
    return header


def encode_prefix(header: bytes, payload: int) -> bytes:
    """The fixed part in front of a header and so many bytes of tensors: all that it promises, or none."""
    return PREFIX.pack(MAGIC, VERSION, len(header), payload)


def decode_prefix(prefix: bytes | bytearray | memoryview) -> tuple[int, int]:
    """Return (header bytes, payload bytes); FrameError where it is not ours, or a length is over its cap."""
    magic, version, header, payload = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise FrameError("The connection carried bytes that are not of this protocol.")
    if version != VERSION:
        what = "The other side speaks protocol version {version}, this side {own}."
        raise FrameError(what, version=version, own=VERSION)
    if header > MAX_HEADER or payload > MAX_PAYLOAD:
        raise FrameError(f"A frame announces {header} header bytes and {payload} payload bytes, over the caps.")
    return header, payload


def decode_header(header: bytes | bytearray, payload: int) -> Message:
    """Decode a header and check that its tensors add up to the payload that is announced, if any; else FrameError."""
    try:
        message = _decoder.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"A message could not be read: {error}.") from error
    specs: Sequence[TensorSpec] = getattr(message, "tensors", ())
    if len(specs) > MAX_TENSORS:
        raise FrameError(f"A frame lists {len(specs)} tensors; at most {MAX_TENSORS} travel at once.")
    promised = sum(tensor_bytes(spec) for spec in specs)
    if promised > MAX_PAYLOAD:
        raise FrameError(f"A frame promises {promised} bytes of tensors; at most {MAX_PAYLOAD} travel at once.")
    if payload not in (0, promised):
        raise FrameError(f"A frame announces {payload} payload bytes, but its tensors need {promised}.")
    return message


def read_frame(read: Callable[[int], bytes | bytearray]) -> Frame:
    """The next frame of what `read` gives, so many bytes each time."""
    header_bytes, payload_bytes = decode_prefix(read(PREFIX.size))
    header = bytes(read(header_bytes))
    message = decode_header(header, payload_bytes)
    return Frame(message, header, memoryview(read(payload_bytes)) if payload_bytes else None)
