"""The same bytes on every rank of a mesh, where unlike devices may have made other ones."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..mesh.mesh import Mesh


def of_first_rank(tensor: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Return what the first rank of this stage has. Collective over the stage's ranks; shapes and dtypes are alike.

    First along the batch axes, where each rank hears of the one with its own place in the sequence; so the first rank
    of every sequence group has it, and hands it on.
    """
    groups = [group for group in (mesh.batch, mesh.sequence) if group is not None]
    if not groups:
        return tensor
    same = tensor.clone(memory_format=torch.contiguous_format)
    for group in groups:
        dist.broadcast(same, src=dist.get_global_rank(group, 0), group=group)
    return same
