"""A model's modules as one set of options wraps them. What is compiled and recorded lives here; the weights do not."""

from __future__ import annotations

from dataclasses import dataclass

from ..mesh.mesh import Mesh
from ..networks.network import Network


@dataclass
class Structure:
    """A network, which runs over any mesh, with all its blocks or as a stage, as the last request asked."""

    transformer: Network

    @property
    def parameters(self) -> int:
        """Parameters that this rank has of the model."""
        return sum(parameter.numel() for parameter in self.transformer.parameters())

    def wrap_whole(self) -> Network:
        """The network, with all its blocks."""
        self.transformer.run_as(None)
        return self.transformer

    def wrap_stage(self, owned: tuple[int, int], mesh: Mesh) -> Network:
        """The network as the stage with these blocks, over this mesh."""
        self.transformer.run_as(owned)
        self.transformer.set_mesh(mesh)
        return self.transformer

    def kept_bytes(self) -> int:
        """Bytes of keys and values that are here."""
        stage = self.transformer.stage
        return 0 if stage is None else sum(each.nbytes for each in stage.patch.kept)
