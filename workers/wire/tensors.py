"""Tensors as bytes on the wire."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from .frames import ITEM_BYTES, MAX_TENSORS, tensor_bytes
from .protocol import TensorSpec

_DTYPES = {name: getattr(torch, name) for name in ITEM_BYTES}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ALIGNMENT = 16


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """What a tensor is on the wire."""
    if tensor.dtype not in _NAMES:
        raise TypeError(f"tensor {name!r} of type {tensor.dtype} does not travel")
    return TensorSpec(name, _NAMES[tensor.dtype], tuple(tensor.shape))


def pack(tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[TensorSpec, ...], list[memoryview]]:
    """Specs and bytes of named tensors, ready for `Connection.send`. Tensors on a GPU are copied to the host."""
    specs, buffers = [], []
    for name, tensor in tensors.items():
        specs.append(spec_of(name, tensor))
        host = tensor.detach().cpu().contiguous()
        if host.numel():
            buffers.append(host.reshape(-1).view(torch.uint8).numpy().data)
    return tuple(specs), buffers


def in_pieces(
    tensors: Mapping[str, torch.Tensor], most_bytes: int, most: int = MAX_TENSORS
) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors in their order, so many and so many bytes at a time, or one where that has more. Memory that is
    shared with the ranks then need be no larger for them."""
    piece: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if piece and (size + tensor.nbytes > most_bytes or len(piece) == most):
            yield piece
            piece, size = {}, 0
        piece[name] = tensor
        size += tensor.nbytes
    if piece:
        yield piece


def unpack(specs: Sequence[TensorSpec], payload: memoryview | torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The named tensors of a payload, bytes or a uint8 tensor on any device, without a copy where the alignment
    allows."""
    if payload is None:
        payload = torch.empty(0, dtype=torch.uint8)
    elif not isinstance(payload, torch.Tensor):
        payload = torch.frombuffer(payload, dtype=torch.uint8)
    tensors: dict[str, torch.Tensor] = {}
    start = 0
    for spec in specs:
        length = tensor_bytes(spec)
        part = payload[start : start + length]
        start += length
        if part.storage_offset() % _ALIGNMENT:
            part = part.clone()
        dtype = _DTYPES[spec.dtype]
        tensors[spec.name] = part.view(dtype).reshape(spec.shape) if length else part.new_empty(spec.shape, dtype=dtype)
    return tensors


def unpack_meta(specs: Sequence[TensorSpec]) -> dict[str, torch.Tensor]:
    """The named tensors without their data, on the meta device: what PREPARE validates, the same on every rank."""
    return {spec.name: torch.empty(spec.shape, dtype=_DTYPES[spec.dtype], device="meta") for spec in specs}
