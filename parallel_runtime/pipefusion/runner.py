"""One evaluation of a stage of a network on one pipeline: forwards, and the messages between its stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..denoising.predict import Call, own_calls
from ..mesh.launched import MESSAGE, count
from ..mesh.mesh import Link
from ..networks.latent_patches import Patch, cut_patches
from ..networks.network import Network
from ..networks.shares import gather_batch
from ..requests.conditioning import Conditioning

_Forward = tuple[int, Patch | None]


class StageRunner:
    """Runs one stage of one request, whose blocks the network has. A branch's forward sees something like x (B, C, ...)
    in shape, dtype and device; it is cut into so many patches, and may `keep` keys and values between evaluations."""

    def __init__(self, network: Network, branches: Sequence[Conditioning], x: Tensor, patches: int, keep: bool):
        self.mesh = mesh = network.mesh
        assert mesh.links is not None
        self._network, self._x, self._keep = network, x, keep
        self.batch, self.total = x.shape[0], x.shape[0] * len(branches)
        self.inbox, self.outbox = Inbox(mesh.links.previous, x.device), Outbox(mesh.links.following)
        self.first = mesh.coordinate["pipe"] == 0
        self.last = mesh.coordinate["pipe"] == mesh.plan.pipe - 1
        self.patches = cut_patches(tuple(x.shape), network.token, patches)
        numbers = torch.arange(self.total, device=x.device).split(self.batch)
        calls = [Call(n, n.float(), branch) for n, branch in zip(numbers, branches, strict=True)]
        self._parts = own_calls(calls, mesh)
        self._known: dict[_Forward, tuple[int, torch.dtype]] = {}

    def expect(self, patch: Patch | None) -> None:
        """Post the receives of an evaluation, once their sizes are known; not on the first stage."""
        for number in range(len(self._parts)):
            if (number, patch) in self._known:
                self.inbox.expect(*self._known[number, patch])

    def evaluate(self, inputs: Sequence[Tensor], timestep: Tensor, patch: Patch | None) -> list[Tensor] | None:
        """Run this stage for one patch, or for all at once. Collective over the pipeline's neighbours in turn.

        Inputs are per CFG branch what the network sees, (B, C, ...) in its dtype, the whole latent, of which later
        stages read the shape alone; the timestep is (B,) float32. On the last stage the prediction of every branch
        comes back, rows flattened: of the patch or of the whole. Else None.
        """
        stacked, timesteps = torch.cat(list(inputs)), timestep.repeat(len(inputs))
        outputs = []
        stage = self._network.stages.now
        assert stage is not None
        for number, part in enumerate(self._parts):
            stage.receive = lambda shapes, dtype, key=(number, patch): self._receive(shapes, dtype, key)
            # One message of all streams, which are of one dtype.
            stage.send = lambda streams: self.outbox.send(torch.cat([each.reshape(-1) for each in streams.values()]))
            stage.patch.begin(number, patch, self.patches[-1].tokens[1], self._keep)
            made = self._network.predict(stacked[part.x], timesteps[part.x], part.conditioning.arguments)
            if self.last:
                outputs.append(_band(made, patch))
        if not self.last:
            return None
        local = torch.cat(outputs) if outputs else _band(self._x.new_empty((0, *self.output_shape()[1:])), patch)
        return list(gather_batch(local, self.total, self.mesh).split(self.batch))

    def output_shape(self) -> tuple[int, ...]:
        """Of what the network predicts for a branch."""
        return self._network.output_shape(tuple(self._x.shape))

    def finish(self) -> None:
        """A run is over: let the keys and values go."""
        if self._network.stages.now is not None:
            self._network.stages.now.forget()

    def _receive(self, shapes: Mapping[str, torch.Size], dtype: torch.dtype, key: _Forward) -> dict[str, Tensor]:
        sizes = [shape.numel() for shape in shapes.values()]
        if key not in self._known:
            self._known[key] = sum(sizes), dtype
            self.inbox.expect(*self._known[key])
        parts = self.inbox.take().split(sizes)
        return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def flatten_rows(latent: Tensor) -> Tensor:
    """(B, C, H, W) as it is; (B, C, F, H, W) -> (B, C, F·H, W)."""
    return latent.flatten(2, -2)


def _band(latent: Tensor, patch: Patch | None) -> Tensor:
    rows = flatten_rows(latent)
    return rows if patch is None else rows[patch.band]


class Outbox:
    """Sends without waiting. A tensor stays alive until it has gone."""

    def __init__(self, link: Link):
        self._link = link
        self._going: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, message: Tensor) -> None:
        """Send a contiguous 1-D tensor. An empty one is not sent, and not waited for."""
        while self._going and self._going[0][0].is_completed():
            self._going.popleft()
        if message.numel():
            count(MESSAGE, self._link.group)
            work = dist.isend(message, dst=self._link.peer, group=self._link.group)
            assert work is not None  # a rank of the link's own group
            self._going.append((work, message))

    def flush(self) -> None:
        """Wait until all has gone."""
        while self._going:
            self._going.popleft()[0].wait()


class Inbox:
    """Receives in the order in which `expect` was called; what is expected may arrive while the rank computes."""

    def __init__(self, link: Link, device: torch.device):
        self._link, self._device = link, device
        self._coming: deque[tuple[dist.Work | None, Tensor]] = deque()

    def expect(self, numel: int, dtype: torch.dtype) -> None:
        """Post a receive of a 1-D tensor."""
        message, work = torch.empty(numel, dtype=dtype, device=self._device), None
        if numel:
            count(MESSAGE, self._link.group)
            work = dist.irecv(message, src=self._link.peer, group=self._link.group)
        self._coming.append((work, message))

    def take(self) -> Tensor:
        """Wait for the oldest expected message (on a GPU its stream waits) and return it."""
        work, message = self._coming.popleft()
        if work is not None:
            work.wait()
        return message
