"""Links between neighbouring stages, one communicator per direction: one for both would let the two stages of a
pipeline of two wait for each other, as both send before they receive."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..config import AXES, ParallelPlan
from .groups import GroupKey, Groups
from .launched import MESSAGE, count


@dataclass(frozen=True)
class Link:
    """One direction between two ranks: their group, and the other one's global rank."""

    group: dist.ProcessGroup
    peer: int


@dataclass(frozen=True)
class Links:
    """A rank's two neighbours on the ring of stages: the last stage's next is the first."""

    previous: Link
    following: Link


def link_groups(plan: ParallelPlan) -> list[GroupKey]:
    """The groups that `build_links` joins, each of (source, target), in its order."""
    if plan.pipe == 1:
        return []
    ranks = torch.arange(plan.world_size).reshape(plan.shape).movedim(AXES.index("pipe"), -1)
    pipelines = ranks.reshape(-1, plan.pipe).tolist()
    return [(link, "link") for each in pipelines for link in zip(each, each[1:] + each[:1], strict=True)]


def build_links(plan: ParallelPlan, rank: int, groups: Groups) -> Links | None:
    """A rank's links in a plan; None where there is one stage, or the rank takes no part. Collective over the world."""
    links: dict[str, Link] = {}
    for key in link_groups(plan):
        (source, target), group = key[0], groups.join(key)
        if group is not None and rank == source:
            links["out"] = Link(group, target)
        elif group is not None:
            links["in"] = Link(group, source)
    return Links(links["in"], links["out"]) if "in" in links else None


class Outbox:
    """Sends without waiting. A tensor stays alive until it has gone."""

    def __init__(self, link: Link):
        self._link = link
        self._going: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def send(self, message: torch.Tensor) -> None:
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
        self._coming: deque[tuple[dist.Work | None, torch.Tensor]] = deque()

    def expect(self, numel: int, dtype: torch.dtype) -> None:
        """Post a receive of a 1-D tensor."""
        message, work = torch.empty(numel, dtype=dtype, device=self._device), None
        if numel:
            count(MESSAGE, self._link.group)
            work = dist.irecv(message, src=self._link.peer, group=self._link.group)
        self._coming.append((work, message))

    def take(self) -> torch.Tensor:
        """Wait for the oldest expected message (on a GPU its stream waits) and return it."""
        work, message = self._coming.popleft()
        if work is not None:
            work.wait()
        return message


def pack(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """One message of several tensors of one dtype."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


def unpack(message: torch.Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, torch.Tensor]:
    """The tensors of a message, views of it."""
    parts = message.split([shape.numel() for shape in shapes.values()])
    return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
