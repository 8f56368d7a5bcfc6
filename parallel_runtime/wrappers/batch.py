"""The batch split: rows of a ready batch (CFG branches, images) dealt over data × cfg, gathered after the forward.

All ranks of a sequence group have the same batch share, so they also agree on whether there is anything to compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import RequestError
from ..mesh import Mesh
from .shares import gather_shares, split_sizes, take_share


def split_batch(values: Mapping[str, Any], batch: int, mesh: Mesh) -> dict[str, Any] | None:
    """Return this rank's share of a batch-first call, such as ComfyUI's `diffusion_model(x, timestep, context, ...)`.

    Args:
        values: tensors of `batch` rows are split on dim 0, tensors of one row or no dim serve every row and stay;
            lists, tuples and mappings are searched for tensors, everything else stays.
        batch: rows of the whole call.

    Returns:
        The share, or None where this rank has no row: it then skips the forward and still joins `gather_batch`.

    Raises:
        RequestError: a tensor with another number of rows, by name, on every rank alike.
    """
    for name, value in values.items():
        _check_rows(name, value, batch)  # before any rank goes its own way
    if mesh.plan.batch == 1:
        return dict(values)
    if split_sizes(batch, mesh.plan.batch)[mesh.batch_index] == 0:
        return None
    return {name: _share(value, batch, mesh) for name, value in values.items()}


def gather_batch(output: torch.Tensor | None, batch: int, mesh: Mesh, like: torch.Tensor) -> torch.Tensor:
    """Return the whole batch on every rank. Collective over `mesh.batch`, which every rank must join.

    Args:
        output: this rank's rows, or None where `split_batch` gave none.
        batch: rows of the whole call.
        like: any tensor whose rows have the shape, dtype and device of the output's, for ranks without rows.
    """
    if mesh.batch is None:
        assert output is not None
        return output
    rows = like.new_empty((0, *like.shape[1:])) if output is None else output
    assert rows.shape[1:] == like.shape[1:] and rows.dtype == like.dtype, (rows.shape, rows.dtype, like.shape)
    return gather_shares(rows, 0, batch, mesh.batch, mesh.plan.batch)


def _check_rows(name: str, value: Any, batch: int) -> None:
    if isinstance(value, torch.Tensor):
        if value.dim() and value.shape[0] not in (1, batch):
            raise RequestError(
                f"The input {name} has {value.shape[0]} rows in a batch of {batch}.",
                "Give every input the batch's number of rows, or one row for all.",
            )
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _check_rows(f"{name}[{key!r}]", item, batch)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_rows(f"{name}[{index}]", item, batch)


def _share(value: Any, batch: int, mesh: Mesh) -> Any:
    if isinstance(value, torch.Tensor):
        whole = not value.dim() or value.shape[0] != batch
        return value if whole else take_share(value, 0, mesh.plan.batch, mesh.batch_index)
    if isinstance(value, Mapping):
        return {key: _share(item, batch, mesh) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_share(item, batch, mesh) for item in value)
    return value
