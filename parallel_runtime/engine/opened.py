"""A model file that was opened and not read: its facts, and the modules that its weights will go to.

This is where a network comes from. What follows (weights, stages, wrapping) asks it for facts and for modules without
memory, and knows nothing of the file's library but the family's data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..loading.checkpoint import Checkpoint, open_checkpoint
from ..loading.weights import build_transformer, check_weights
from ..networks.absent_blocks import Relay, keep_blocks
from ..networks.diffusers.spec import WeightRule
from ..planning.describe import describe_model, parameter_shapes
from ..requests.facts import ModelFacts
from ..requests.requests import Load


@dataclass(frozen=True)
class Skeleton:
    """A model's modules without weights, as far as this rank has them.

    Args:
        rules: what fills them.
        relay: stands in for blocks of other ranks; None where this one has all.
    """

    module: torch.nn.Module
    rules: list[WeightRule]
    relay: Relay | None


@dataclass(frozen=True)
class Opened:
    """A checkpoint before its weights are read.

    Args:
        dtype: that the weights are to have.
        facts: what plans are made from.
    """

    checkpoint: Checkpoint
    dtype: torch.dtype
    facts: ModelFacts

    @classmethod
    def open(cls, request: Load) -> Opened:
        """Examine a file.

        Raises:
            CheckpointError, UnsupportedModelError: see `open_checkpoint`.
        """
        checkpoint = open_checkpoint(request.path)
        dtype = getattr(torch, request.dtype)
        shapes = parameter_shapes(checkpoint)
        return cls(checkpoint, dtype, describe_model(checkpoint.spec, checkpoint.config, shapes, dtype.itemsize))

    def build(self, owned: tuple[int, int] | None) -> Skeleton:
        """The modules, without memory.

        Args:
            owned: (start, stop) of the blocks that this rank has; None for all.

        Raises:
            CheckpointError: the file does not fill them.
        """
        module = build_transformer(self.checkpoint)
        rules = check_weights(module, self.checkpoint)
        if owned is None:
            return Skeleton(module, rules, relay=None)
        relay = keep_blocks(module, self.checkpoint.spec, owned)
        relay.forget()
        return Skeleton(module, rules, relay)
