"""Stages of a transformer that is there, and PipeFusion in one process: one that hands its messages to itself.

The number of stages does not change what a run computes; patches and warm-up steps do. So one process is enough to
see what they do to a picture, and for an oracle of several.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from parallel_runtime.mesh.mesh import Link, Links, Mesh
from parallel_runtime.networks.diffusers.parallel_transformer import ParallelTransformer, parallelize
from parallel_runtime.networks.diffusers.spec import ModelSpec
from parallel_runtime.networks.stages import all_blocks, let_go
from parallel_runtime.pipefusion.runner import StageRunner
from parallel_runtime.planning.cut import split_blocks
from parallel_runtime.requests.conditioning import Conditioning


def stage_of(transformer: nn.Module, spec: ModelSpec, mesh: Mesh, compile: bool = False) -> ParallelTransformer:
    """Wrap a diffusers transformer that has all its blocks as this rank's stage; the others' weights go."""
    blocks = all_blocks(transformer, spec.cut)
    owned = split_blocks([1.0] * len(blocks), mesh.plan.pipe)[mesh.coordinate["pipe"]]
    let_go(transformer, spec.cut, owned)
    wrapped = parallelize(transformer, spec, mesh, compile=compile, owned=owned)
    wrapped.stages.run_as(owned)
    return wrapped


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


class LoneRunner(StageRunner):
    """The runner of a pipeline of one stage: PipeFusion's patches without its messages.

    Args:
        stage: of `stage_of`, over one rank.
        branches, x, patches: as for `StageRunner`.

    Raises:
        RequestError: the latent cannot be cut so.
    """

    def __init__(self, stage: ParallelTransformer, branches: Sequence[Conditioning], x: torch.Tensor, patches: int):
        nowhere: Any = None
        if stage.mesh.links is None:
            stage.set_mesh(replace(stage.mesh, links=Links(Link(nowhere, 0), Link(nowhere, 0))))
        super().__init__(stage, branches, x, patches, keep=True)
        self.stage = stage
        self.inbox = self.outbox = _Loop()  # type: ignore[assignment]
