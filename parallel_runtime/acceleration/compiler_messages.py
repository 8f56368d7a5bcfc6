"""What a rank and its compiler process tell each other: a line of JSON each, on a socket pair."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ..config import ParallelPlan
from ..mesh.mesh import Mesh

GROUPS = ("ulysses", "ring", "sequence", "batch")
_TENSOR = "tensor"


class ToCompile(msgspec.Struct, frozen=True):
    """The model, told first.

    Args:
        spec: key of the registry. config: of diffusers' class.
        device: as torch names it. attention: key of KERNELS.
        rank, world_size: of the default process group.
        modulate: see `parallelize`.
    """

    spec: str
    config: dict[str, Any]
    dtype: str
    device: str
    attention: str
    rank: int
    world_size: int
    modulate: bool = True


class HostToCompile(msgspec.Struct, frozen=True):
    """A ComfyUI network, told first.

    Args:
        path: of the file. weights, fast_float8: see ComfyuiCode. folder, options: of ComfyUI.
        network: "module:class" that the file is.
        device, rank, world_size: see ToCompile.
    """

    path: str
    weights: str
    fast_float8: bool
    folder: str
    options: dict[str, Any]
    network: str
    device: str
    rank: int
    world_size: int


class Part(msgspec.Struct, frozen=True):
    """A mesh without its groups' connections: the ranks of each, and its name, which is a constant of a graph."""

    plan: dict[str, int]
    rank: int
    coordinate: dict[str, int]
    speeds: list[float] | None
    groups: dict[str, tuple[list[int], str]]


class Call(msgspec.Struct, frozen=True):
    """One call to compile for.

    Args:
        arguments: as `describe` gives them.
        peer_bytes: of the memory that the ranks share, None where heads go by collectives.
    """

    number: int
    part: Part
    arguments: Any
    peer_bytes: int | None


class Outcome(msgspec.Struct, frozen=True):
    """A call's graphs are made, or why not.

    Args:
        modules: of the packages that compile, what the compiler has imported; a rank needs much of it to find a graph.
    """

    number: int
    failure: str = ""
    modules: tuple[str, ...] = ()


def world() -> tuple[int, int]:
    """This rank and the number of ranks, of the moment."""
    joined = dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)


def describe_mesh(mesh: Mesh, ranks_of: Any) -> Part:
    """Args: ranks_of: torch.distributed.get_process_group_ranks."""
    groups = {name: getattr(mesh, name) for name in GROUPS}
    return Part(
        {field: getattr(mesh.plan, field) for field in mesh.plan.__dataclass_fields__},
        mesh.rank,
        dict(mesh.coordinate),
        None if mesh.speeds is None else list(mesh.speeds),
        {name: (ranks_of(group), group.group_name) for name, group in groups.items() if group is not None},
    )


def read_mesh(part: Part, groups: Mapping[str, Any]) -> Mesh:
    """Inverse of `describe_mesh`, over these groups."""
    speeds = None if part.speeds is None else tuple(part.speeds)
    return Mesh(ParallelPlan(**part.plan), part.rank, part.coordinate, speeds, **groups)


def describe(value: Any) -> Any:
    """Arguments as plain data: of tensors shape, strides, where in their storage they begin, dtype, and whether they
    are on the rank's device.

    Raises:
        TypeError: something else than tensors, numbers, texts, lists and mappings.
    """
    if isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        return {_TENSOR: [list(value.shape), list(value.stride()), value.storage_offset(), name, value.device.type]}
    if isinstance(value, Mapping):
        return {"mapping": [[name, describe(each)] for name, each in value.items()]}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [describe(each) for each in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be described")


def make(described: Any, device: torch.device) -> Any:
    """Arguments of that description, tensors full of zeros."""
    if not isinstance(described, dict):
        return described
    ((kind, content),) = described.items()
    if kind == _TENSOR:
        shape, stride, offset, dtype, device_type = content
        where = device if device_type == device.type else torch.device(device_type)
        last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if all(shape) else -1
        storage = torch.zeros(offset + last + 1, dtype=getattr(torch, dtype), device=where)
        return storage.as_strided(shape, stride, offset).data  # as .data it is a view of nothing
    if kind == "mapping":
        return {name: make(each, device) for name, each in content}
    made = [make(each, device) for each in content]
    return tuple(made) if kind == "tuple" else made
