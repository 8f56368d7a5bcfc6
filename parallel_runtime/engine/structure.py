"""A model's modules as one set of options wraps them. What is compiled and recorded lives here; the weights do not."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..mesh.mesh import Mesh, single_rank_mesh
from ..networks.absent_blocks import keep_blocks
from ..networks.comfyui.host_network import HostNetwork
from ..networks.diffusers.spec import ModelSpec
from ..networks.wrapped.parallel_transformer import ParallelTransformer, parallelize
from ..pipefusion.stage import Stage
from ..streaming.block_stream import BlockStream


@dataclass
class Structure:
    """The wrapped modules; they are wrapped anew where a request's stages ask for it.

    Args:
        attention, compile: as for `parallelize`.
        transformer: wrapped for the last request.
    """

    spec: ModelSpec
    attention: str
    compile: bool
    transformer: ParallelTransformer | Stage

    @classmethod
    def wrap(
        cls,
        module: torch.nn.Module,
        spec: ModelSpec,
        attention: str,
        compile: bool,
        stream: BlockStream | None = None,
    ) -> Structure:
        """Wrap a transformer that has all its blocks.

        Args:
            stream: see `parallelize`; then it has no stages.
        """
        return cls(spec, attention, compile, _wrap(module, spec, attention, compile, stream))

    @property
    def parameters(self) -> int:
        """Parameters that this rank has of the model."""
        return sum(parameter.numel() for parameter in self.transformer.parameters())

    def wrap_whole(self) -> ParallelTransformer:
        """Have the transformer with all its blocks, to be run over any mesh without stages; return it.

        A stage is undone for that. What is wrapped so already stays as it is.
        """
        if isinstance(self.transformer, Stage):
            self.transformer = _wrap(self.transformer.unwrap(), self.spec, self.attention, self.compile)
        return self.transformer

    def wrap_stage(self, owned: tuple[int, int], mesh: Mesh) -> Stage:
        """Have the stage with these blocks, over this mesh; return it.

        Blocks of others, where the rank has them, are put aside. What is wrapped so already only changes its mesh.
        """
        if isinstance(self.transformer, Stage) and self.transformer.owned != owned:
            self.wrap_whole()  # the last plan had other stages
        if isinstance(self.transformer, ParallelTransformer):
            module = self.transformer.unwrap()
            relay = keep_blocks(module, self.spec, owned)
            self.transformer = Stage(module, self.spec, relay, mesh, self.attention, self.compile)
        self.transformer.set_mesh(mesh)
        return self.transformer

    def kept_bytes(self) -> int:
        """Bytes of keys and values that are here from the last run; the next one uses them or lets them go."""
        return sum(each.nbytes for each in self.transformer.keys.buffers) if isinstance(self.transformer, Stage) else 0


@dataclass
class HostStructure:
    """A ComfyUI network, which runs over any mesh, with all its blocks or as a stage."""

    transformer: HostNetwork

    @property
    def parameters(self) -> int:
        """Parameters that this rank has of the model."""
        return sum(parameter.numel() for parameter in self.transformer.parameters())

    def wrap_whole(self) -> HostNetwork:
        """The network, with all its blocks."""
        self.transformer.run_as(None)
        return self.transformer

    def wrap_stage(self, owned: tuple[int, int], mesh: Mesh) -> HostNetwork:
        """The network as the stage with these blocks, over this mesh."""
        self.transformer.run_as(owned)
        self.transformer.set_mesh(mesh)
        return self.transformer

    def kept_bytes(self) -> int:
        """Bytes of keys and values that are here."""
        return 0 if self.transformer.stage is None else self.transformer.stage.patch.kept_bytes


def _wrap(
    module: torch.nn.Module,
    spec: ModelSpec,
    attention: str,
    compile: bool,
    stream: BlockStream | None = None,
) -> ParallelTransformer:
    return parallelize(
        module,
        spec,
        single_rank_mesh(),
        attention=attention,
        compile=compile,
        stream=stream,
        # Shares of these layers would be read before their blocks are there.
        modulate=stream is None,
    )
