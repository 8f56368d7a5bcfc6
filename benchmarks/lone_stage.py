"""PipeFusion in one process: a stage that has all blocks, and hands its messages to itself.

The number of stages does not change what a run computes; patches and warm-up steps do. So one process is enough to
see what they do to a picture, and for an oracle of several.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from parallel_runtime.mesh.links import Link, Links
from parallel_runtime.mesh.mesh import single_rank_mesh
from parallel_runtime.networks.absent_blocks import block_paths, keep_blocks
from parallel_runtime.networks.diffusers.spec import ModelSpec
from parallel_runtime.pipefusion.runner import StageRunner
from parallel_runtime.pipefusion.stage import Stage
from parallel_runtime.requests.conditioning import Conditioning


class _Loop:
    """Both ends of the link from a stage to itself; sends and takes come in the same order."""

    def __init__(self) -> None:
        self._messages: deque[torch.Tensor] = deque()

    def send(self, message: torch.Tensor) -> None:
        self._messages.append(message)

    def expect(self, numel: int, dtype: torch.dtype) -> None:
        pass

    def take(self) -> torch.Tensor:
        return self._messages.popleft()

    def flush(self) -> None:
        pass


def whole_stage(transformer: nn.Module, spec: ModelSpec, attention: str = "auto", compile: bool = False) -> Stage:
    """Wrap a diffusers transformer as the only stage of a pipeline; needs no torch.distributed.

    Raises:
        ConfigurationError: the family has no stage data.
    """
    relay = keep_blocks(transformer, spec, (0, len(block_paths(transformer, spec))))
    return Stage(transformer, spec, relay, single_rank_mesh(), attention, compile, record=False)


class LoneRunner(StageRunner):
    """The runner of `whole_stage`: PipeFusion's patches without its messages.

    Args:
        stage, branches, x, patches: as for `StageRunner`.

    Raises:
        RequestError: the latent cannot be cut so.
    """

    def __init__(self, stage: Stage, branches: Sequence[Conditioning], x: torch.Tensor, patches: int):
        nowhere: Any = None
        super().__init__(stage, Links(Link(nowhere, 0), Link(nowhere, 0)), branches, x, patches, keep=True)
        self.inbox = self.outbox = _Loop()  # type: ignore[assignment]
