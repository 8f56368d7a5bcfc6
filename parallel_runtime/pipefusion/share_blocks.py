"""Which blocks a stage gets, from a transformer that has all of them; engines plan it from the file's header."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from ..networks.absent_blocks import block_paths, stages_of
from ..networks.diffusers.spec import ModelSpec
from ..planning.cut import Deal, deal_blocks


def share_blocks(
    transformer: nn.Module,
    spec: ModelSpec,
    stages: int,
    most: float = math.inf,
    speeds: Sequence[float] | None = None,
) -> Deal:
    """Deal the blocks of a transformer that has all of them to stages; see `deal_blocks` for the arguments.

    Raises:
        ConfigurationError: see `deal_blocks`.
    """
    blocks = [transformer.get_submodule(path) for path in block_paths(transformer, spec)]
    sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks]
    return deal_blocks(sizes, stages, most, stages_of(spec).skips, speeds)
