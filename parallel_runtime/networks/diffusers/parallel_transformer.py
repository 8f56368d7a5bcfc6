"""Wraps a diffusers transformer so that the ranks of a mesh compute one forward together, with the same result."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...acceleration.recordings import RecordedForward
from ...mesh.mesh import Layout, Mesh
from ...streaming.block_stream import BlockStream
from ...streaming.streamed_calls import stream_calls
from ...switches import is_on
from ..marked_blocks import pulse_of
from ..repeated_calls import RepeatedCalls
from ..stages import StageBlocks
from .cut_transformer import CutTransformer
from .network_parts import MeshCheck, NetworkParts
from .spec import ModelSpec


def parallelize(
    transformer: nn.Module,
    spec: ModelSpec,
    mesh: Mesh,
    attention: str = "auto",
    compile: bool = False,
    record: bool = True,
    share: bool = True,
    stream: BlockStream | None = None,
    modulate: bool = True,
    owned: tuple[int, int] | None = None,
) -> ParallelTransformer:
    """Let the ranks of `mesh` run `transformer` together; call it on every rank with the same arguments.

    Args:
        transformer: a diffusers transformer with its weights on this rank's device, whole on every rank.
        spec: the model as data.
        mesh: may be changed later with `ParallelTransformer.set_mesh`; one rank needs no torch.distributed.
        attention: one of config.ATTENTION_BACKENDS.
        compile: regional torch.compile of the blocks in `spec.block_lists`.
        record: on a GPU, forwards that repeat become CUDA graphs (recordings.py). Nothing to gain on a CPU.
        share: GPUs of one host that can write to each other's memory exchange heads in this way (peer_exchange.py).
        stream: brings the weights of blocks when they run; None where they are there.
        modulate: ranks share out modulation layers, if the family has such.
        owned: (start, stop) of the blocks that have weights; None: all.

    Raises:
        UnsupportedModelError: the transformer is not what the spec describes, or its attention cannot be exchanged.
        ConfigurationError: the mesh or the attention backend cannot be used here.
    """
    parts = NetworkParts.find(transformer, spec, attention)
    check = MeshCheck(parts)
    check.check(mesh)
    # From here on the transformer is changed, and nothing refuses any more but what comes first.
    shared = share and spec.splits_sequence and is_on("peers")
    cut = CutTransformer(parts, mesh, parts.peer_sharing() if shared else None, modulate, compile)
    recorded = record and parts.device.type == "cuda" and is_on("recordings")
    if stream is not None:
        stream_calls(parts.blocks, stream)
    return ParallelTransformer(parts, mesh, check, cut, recorded, stream, owned)


class ParallelTransformer(RepeatedCalls):
    """A transformer whose forward is computed by all ranks of a sequence group; see `parallelize`.

    Called as the wrapped transformer is, with whole (not split) arguments, alike on all ranks of the group, and
    returns the whole result on each of them. Attributes it does not have are the wrapped transformer's.
    Inference only: no gradients flow.

    Args:
        parts: the transformer, and what is known of it.
        check: refuses meshes.
        cut: what was changed of it.
        recorded: forwards that repeat become CUDA graphs.
        stream, owned: see `parallelize`.
    """

    def __init__(
        self,
        parts: NetworkParts,
        mesh: Mesh,
        check: MeshCheck,
        cut: CutTransformer,
        recorded: bool,
        stream: BlockStream | None = None,
        owned: tuple[int, int] | None = None,
    ):
        self.stream = stream
        self.transformer = parts.transformer
        self.spec = parts.spec
        self.attention = parts.kernel
        self.mesh = mesh
        self._parts = parts
        self._check = check
        self._cut = cut
        self._compilation = cut.compilation
        self._owned = owned
        self._signature = inspect.signature(parts.transformer.forward)
        self._recorded: RecordedForward | None = None
        if recorded:
            # A graph ends where all its streams have come together, so that one of a stream of weights is not cut.
            pulse = pulse_of(parts.transformer, parts.spec.block_lists) if stream is None else None
            self._recorded = RecordedForward(self.call_at_once, made_outside=self.made_outside, pulse=pulse)

    def check_ring(self, layout: Layout) -> None:
        """See `MeshCheck.check_ring`."""
        self._check.check_ring(layout)

    def set_mesh(self, mesh: Mesh) -> None:
        """Run over another mesh from the next forward on, with the same weights. Costs nothing; every rank calls it.

        Raises:
            ConfigurationError: see `MeshCheck.check`; nothing has changed.
        """
        if mesh is self.mesh:
            return
        self._check.check(mesh)
        self.mesh = mesh
        self._cut.set_mesh(mesh)

    def forget_runs(self) -> None:
        """Let go of all that runs have left behind: recordings, layouts, outputs of the last forward. What is compiled
        stays."""
        self.forget_calls()
        self._cut.forget()

    def unwrap(self) -> nn.Module:
        """Undo everything and return the transformer as it was. The wrapper is of no use afterwards."""
        if self._recorded is not None:
            self._recorded.clear()
        self._cut.undo()
        if self._compilation is not None:
            self._compilation.undo()
        return self.transformer

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped transformer's forward. Collective over the sequence group."""
        return self.record_or_call("forward", *args, **kwargs)

    @torch.no_grad()
    def predict(self, x: torch.Tensor, timestep: torch.Tensor, conditioning: Mapping[str, Any]) -> torch.Tensor:
        """One call in ComfyUI's convention, through the family's adapter. Collective over the sequence group.

        Where forwards are recorded, the adapter's part is recorded with them: all of it is one launch.

        Args:
            x: (B, C, ...); timestep: (B,) float32; conditioning: context and the family's extras.

        Returns:
            The prediction, shaped like the latent part of x, in the model's dtype.
        """
        if self.stage is not None:
            return self._predict(x, timestep, dict(conditioning))
        return self.record_or_call("predict", x, timestep, dict(conditioning))

    @property
    def stage(self) -> StageBlocks | None:
        """As which it runs; None: with all its blocks."""
        return self._cut.stage

    @property
    def owned(self) -> tuple[int, int] | None:
        """(start, stop) of the blocks that it runs; None: all."""
        return self._owned if self.stage is None else self.stage.owned

    @property
    def token(self) -> int:
        """Latent positions along one side of a token."""
        return self.spec.token

    def run_as(self, owned: tuple[int, int] | None) -> None:
        """Run as the stage with these blocks from the next call on; None: with all."""
        self._cut.run_as(owned)

    @property
    def rows_together(self) -> bool:
        """Rows of a batch are independent of one another."""
        return False

    def residual_rows(self, residuals: Any, tokens: Mapping[str, int]) -> dict[str, tuple[int, int]]:
        """diffusers' network takes no residuals."""
        return {}

    def output_shape(self, x_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape that `predict` gives for an x of that shape."""
        return self.spec.adapter.output_shape(x_shape, self.config)

    def call_at_once(self, convention: str, *args: Any, **kwargs: Any) -> Any:
        """What `forward` and `predict` (their names are the convention) do, without recording."""
        return self._predict(*args) if convention == "predict" else self._run(*args, **kwargs)

    def _predict(self, x: torch.Tensor, timestep: torch.Tensor, conditioning: dict[str, Any]) -> torch.Tensor:
        arguments = self.spec.adapter.to_transformer(x, timestep, config=self.config, **conditioning)
        output = self._run(**arguments, return_dict=False)[0]
        return self.spec.adapter.from_transformer(output, x)

    def made_outside(self) -> list[Any]:
        """What the last forward read besides arguments and weights; a recording keeps it alive."""
        return self._cut.read()

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        with self._cut.forward(self._signature.bind(*args, **kwargs).arguments.get("timestep")):
            return self._forward(*args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as held:
            if self._compilation is not None:
                held.enter_context(self._compilation.around_forward())
            if self.stream is not None:
                held.enter_context(self.stream.forward())
            return self.transformer(*args, **kwargs)

    __call__ = forward

    def __getattr__(self, name: str) -> Any:
        if name == "transformer":  # not set yet: construction failed, or a copy is being made
            raise AttributeError(name)
        return getattr(self.transformer, name)
