"""What the engine runs a model's calls with: a network over a mesh, whatever its source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch

from ..mesh.mesh import Layout, Mesh
from .stages import StageBlocks


class Network(Protocol):
    """A network whose forward all ranks of a mesh compute together, or those of a stage.

    See ParallelTransformer for what each method does.
    """

    before_compiling: Callable[[], None]

    @property
    def stage(self) -> StageBlocks | None:
        """As which it runs; None: with all its blocks."""
        ...

    @property
    def token(self) -> int:
        """Latent positions along one side of a token."""
        ...

    def run_as(self, owned: tuple[int, int] | None) -> None:
        """Run as the stage with these blocks from the next call on; None: with all."""
        ...

    @property
    def owned(self) -> tuple[int, int] | None:
        """(start, stop) of the blocks that it runs; None: all."""
        ...

    @property
    def rows_together(self) -> bool:
        """Rows of a batch cannot be told apart: every rank computes all of them."""
        ...

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Of this rank."""
        ...

    def set_mesh(self, mesh: Mesh) -> None:
        """Run over another mesh."""
        ...

    def check_ring(self, layout: Layout) -> None:
        """Refuse a layout with a ring for which the attention backend is not made."""
        ...

    def predict(self, x: torch.Tensor, timestep: torch.Tensor, conditioning: Mapping[str, Any]) -> torch.Tensor:
        """One call in ComfyUI's convention. Collective over the sequence group."""
        ...

    def residual_rows(self, residuals: Any, tokens: Mapping[str, int]) -> dict[str, tuple[int, int]]:
        """Which rows of a ControlNet's residuals this rank read in the last call."""
        ...

    def output_shape(self, x_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape that `predict` gives for an x of that shape."""
        ...

    def offers(self, layout: Layout) -> dict[str, int]:
        """What this rank has recorded over a layout."""
        ...

    def go_on(self, agreed: Mapping[str, int]) -> None:
        """Use what all ranks have recorded."""
        ...

    def leave(self, mesh: Mesh) -> None:
        """Let go of what was recorded over a mesh."""
        ...

    def forget_recordings(self) -> None:
        """Let go of the recordings, on this rank alone."""
        ...

    def forget_runs(self) -> None:
        """Let go of all that runs have left behind."""
        ...
