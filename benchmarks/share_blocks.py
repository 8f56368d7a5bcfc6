"""Which blocks a stage gets, from a transformer that is there; engines plan it from the file's header."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from parallel_runtime.networks.absent_blocks import block_paths, stages_of
from parallel_runtime.networks.diffusers.spec import ModelSpec
from parallel_runtime.planning.cut import Assignment, assign_blocks


def share_blocks(
    transformer: nn.Module,
    spec: ModelSpec,
    stages: int,
    most: float = math.inf,
    speeds: Sequence[float] | None = None,
) -> Assignment:
    """Assign the blocks of a transformer that has all of them to stages; see `assign_blocks` for the arguments.

    Raises:
        ConfigurationError: see `assign_blocks`.
    """
    blocks = [transformer.get_submodule(path) for path in block_paths(transformer, spec)]
    sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks]
    return assign_blocks(sizes, stages, most, stages_of(spec).skips, speeds)
