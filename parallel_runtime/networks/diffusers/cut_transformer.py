"""A diffusers transformer whose blocks are cut as ComfyUI's are: what is changed of it, and the forward under way."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ...acceleration.peer_memory import PeerSharing
from ...attention import rebind
from ...attention.kernels import KERNELS
from ...attention.rotary import exchange_rotary
from ...errors import UnsupportedModelError
from ...mesh.mesh import Mesh
from ...said import said
from ...switches import is_on
from ..attention_operator import attend_by_kernel, attending
from ..block_attention import HostAttention
from ..cut_blocks import cut_blocks, run_blocks, uncut_blocks, unknown_blocks
from ..repeated_calls import BlockCompilation
from ..stages import StageBlocks, run_as
from ..tables.diffusers import DIFFUSERS, cut_of
from ..token_split import RunBlock, TokenSplit
from .network_parts import NetworkParts


class CutTransformer:
    """The cut blocks and the attention of one transformer. Made, they are in place.

    Args:
        peers: None keeps the exchange of heads on collectives.
        modulate: ranks share out modulation layers, if the family has such.
        compile: blocks are compiled when they first run.

    Raises:
        UnsupportedModelError: blocks or attention are not as the family's data says; nothing has changed.
    """

    def __init__(self, parts: NetworkParts, mesh: Mesh, peers: PeerSharing | None, modulate: bool, compile: bool):
        self._parts = parts
        spec = parts.spec
        cut = cut_of(spec.transformer_class)
        if reason := unknown_blocks(parts.transformer, cut):
            raise UnsupportedModelError(
                said(
                    "This {transformer_class} is not as it is known: {reason}.",
                    transformer_class=spec.transformer_class,
                    reason=reason,
                ),
                "Install the diffusers version that this pack asks for.",
            )
        self._rebound = rebind.apply(parts.attention, attend_by_kernel)
        self.split = TokenSplit(mesh)
        self.stage: StageBlocks | None = None
        """As which it runs; None: with all its blocks."""
        self._attend = HostAttention(KERNELS[parts.kernel], self.split)
        self._timestep = ExactTimestep(spec.timestep_scale)
        embedder = parts.transformer.get_submodule(spec.timestep_embedder)
        self._handle: Any = embedder.register_forward_pre_hook(self._timestep.hook, with_kwargs=True)
        self._peers = peers
        self._modulates = modulate and is_on("modulation")
        self._run_block: RunBlock | None = None
        self.compilation = self._compile() if compile else None
        cut_blocks(parts.transformer, cut, self.split)
        if not cut:
            run_blocks(parts.blocks, self.split)

    def _compile(self) -> BlockCompilation:
        from ...acceleration.compiler import allow_in_graph
        from ..compiled_blocks import CompiledCut  # imports much of torch that nothing else needs
        from .package import untraced_classes

        allow_in_graph(untraced_classes(self._parts.transformer))
        exchange_rotary(self._parts.attention.values())
        compiled = CompiledCut(self._parts.transformer, self.split, self._attend)
        self._run_block = compiled.run
        return BlockCompilation(compiled)

    def set_mesh(self, mesh: Mesh) -> None:
        """Go over another mesh from the next forward on."""
        self.split.set_mesh(mesh)

    def run_as(self, owned: tuple[int, int] | None) -> None:
        """Run as the stage with these blocks from the next forward on; None: with all."""
        parts = self._parts
        data = DIFFUSERS.get(parts.spec.transformer_class)
        self.stage = run_as(self.stage, owned, parts.transformer, data, self.split)

    def read(self) -> list[Any]:
        """What the last forward read beside arguments and weights."""
        return self.split.read()

    @contextlib.contextmanager
    def forward(self, timestep: torch.Tensor | None) -> Iterator[None]:
        """What must hold around the transformer's forward.

        Args:
            timestep: (batch,), before the transformer rounds it.
        """
        split = self.split
        self._timestep.begin(timestep)
        split.begin(self._attend, self._run_block, self._peers)
        split.modulation.begin(split.mesh if self._modulates and self.stage is None else None)
        try:
            with attending(self._attend.at, self._attend.over_peers):
                yield
        finally:
            split.end()

    def forget(self) -> None:
        """Let go of what the last forward has left on the device."""
        self.split.forget()
        if self.stage is not None:
            self.stage.forget()
        self._timestep.begin(None)

    def undo(self) -> None:
        """Leave the transformer as it was."""
        self.run_as(None)
        self._handle.remove()
        self._rebound.undo()
        uncut_blocks(self._parts.blocks)
        self.split.modulation.undo()


class ExactTimestep:
    """Holds the timestep of the current forward for the embedder's pre-hook; one object per wrapped transformer."""

    def __init__(self, scale: float):
        self._scale = scale
        self._scaled: torch.Tensor | None = None

    def begin(self, timestep: torch.Tensor | None) -> None:
        """Note the forward's timestep, (batch,), before the transformer rounds it."""
        self._scaled = None if timestep is None else timestep.to(torch.float32) * self._scale

    def hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward pre-hook (with_kwargs) of the embedder: its first argument becomes the exact timestep.

        Once per forward: where the embedder is the bare sinusoid, models call it again for the guidance.
        """
        scaled, self._scaled = self._scaled, None
        if scaled is None:
            return None
        if args:
            return (scaled, *args[1:]), kwargs
        first = next(iter(inspect.signature(module.forward).parameters))
        return args, {**kwargs, first: scaled}
