"""One evaluation of a stage of a ComfyUI network; beside runner.py, which runs diffusers' classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from ..denoising.predict import Call, own_calls
from ..mesh.links import Inbox, Links, Outbox, pack, unpack
from ..mesh.mesh import Mesh
from ..networks.batch import gather_batch
from ..networks.comfyui.latent_patch import LatentPatch
from ..networks.comfyui.stage_blocks import Neighbours
from ..planning.cut import Patch, cut_patches
from ..requests.conditioning import Conditioning
from .runner import flatten_rows

Shapes = Mapping[str, torch.Size]


class StagedNetwork(Protocol):
    """A network that has the blocks of one stage."""

    neighbours: Neighbours
    patch: LatentPatch
    token: int
    """Latent positions along one side of a token."""

    def predict(self, x: torch.Tensor, timestep: torch.Tensor, conditioning: Mapping[str, object]) -> torch.Tensor:
        """See `Network`."""
        ...


class HostStageRunner:
    """Runs one stage of one request, as `StageRunner` does.

    Args:
        branches: conditioning of each CFG branch.
        x: what a branch's forward sees, (B, C, ...); only shape, dtype and device are read.
        patches: that the latent is to be cut into.

    Raises:
        RequestError: the latent cannot be cut so.
    """

    def __init__(
        self,
        network: StagedNetwork,
        mesh: Mesh,
        links: Links,
        branches: Sequence[Conditioning],
        x: torch.Tensor,
        patches: int,
    ):
        self.stage, self.mesh = self, mesh
        self._network, self._x = network, x
        self.batch, self.total = x.shape[0], x.shape[0] * len(branches)
        self.inbox, self.outbox = Inbox(links.previous, x.device), Outbox(links.following)
        self.first = mesh.coordinate["pipe"] == 0
        self.last = mesh.coordinate["pipe"] == mesh.plan.pipe - 1
        self.patches = cut_patches(tuple(x.shape), network.token, patches)
        numbers = torch.arange(self.total, device=x.device).split(self.batch)
        calls = [Call(n, n.float(), branch) for n, branch in zip(numbers, branches, strict=True)]
        self._parts = own_calls(calls, mesh)
        self._known: dict[tuple[int, Patch | None], Shapes] = {}

    def expect(self, patch: Patch | None) -> None:
        """Post the receives of an evaluation, once their shapes are known; not on the first stage."""
        for number in range(len(self._parts)):
            shapes = self._known.get((number, patch))
            if shapes is not None:
                self.inbox.expect(sum(shape.numel() for shape in shapes.values()), self._x.dtype)

    def evaluate(
        self, inputs: Sequence[torch.Tensor], timestep: torch.Tensor, patch: Patch | None
    ) -> list[torch.Tensor] | None:
        """Run this stage for one patch, or for all at once; see `StageRunner.evaluate`."""
        stacked, timesteps = torch.cat(list(inputs)), timestep.repeat(len(inputs))
        outputs = []
        for number, part in enumerate(self._parts):
            self._network.neighbours.receive = lambda shapes, key=(number, patch): self._receive(shapes, key)
            self._network.neighbours.send = lambda streams: self.outbox.send(pack(streams))
            self._network.patch.begin(number, patch, patch is not None and patch is self.patches[-1])
            made = self._network.predict(stacked[part.x], timesteps[part.x], part.conditioning.arguments)
            if self.last:
                rows = flatten_rows(made)
                outputs.append(rows if patch is None else rows[:, :, slice(*patch.rows)])
        if not self.last:
            return None
        local = torch.cat(outputs) if outputs else self._nothing(patch)
        return list(gather_batch(local, self.total, self.mesh).split(self.batch))

    def flush(self) -> None:
        """Wait until everything that was sent has gone."""
        self.outbox.flush()

    def finish(self) -> None:
        """A run is over: let the keys and values go."""
        self._network.patch.clear()

    def _receive(self, shapes: Shapes, key: tuple[int, Patch | None]) -> Mapping[str, torch.Tensor]:
        if key not in self._known:
            self._known[key] = dict(shapes)
            self.inbox.expect(sum(shape.numel() for shape in shapes.values()), self._x.dtype)
        return unpack(self.inbox.take(), {name: tuple(shape) for name, shape in shapes.items()})

    def _nothing(self, patch: Patch | None) -> torch.Tensor:
        rows = flatten_rows(self._x.new_empty((0, *self._x.shape[1:])))
        return rows if patch is None else rows[:, :, slice(*patch.rows)]
