"""Which way heads go between the ranks of a group: the peers' memory, the host's, or NCCL."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..gpu_memory.nvlink import joined_by_nvlink
from ..mesh.agreement import all_agree
from ..mesh.mesh import Mesh
from ..switches import is_on
from .grown_memory import ExchangedHeads, HostMemory, PeerBuffers, PeerMemory
from .host_exchange import HostBuffers


class HeadRoutes:
    """What the ranks of one group share for it."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self._peers, self._host = PeerMemory(group), HostMemory(group)
        self._reach: bool | None = None  # asked once: which GPUs are the group's, each rank knows of its own alone

    @property
    def made(self) -> int:
        """How often memory was shared, of either kind; the same on all ranks."""
        return self._peers.made + self._host.made

    def free(self) -> None:
        """Let all of it go; see GrownMemory."""
        self._peers.free()
        self._host.free()

    def buffers(self, heads: ExchangedHeads) -> PeerBuffers | HostBuffers | None:
        """Return buffers for such heads, None where NCCL has to do it. Collective over the group."""
        if peers_are_near(self._group, heads.device):
            if self._reach is None:
                on_gpu = heads.device.type == "cuda"
                self._reach = not on_gpu or _reach_one_another(self._group, heads.device)
                self._peers.by_stores = not on_gpu or (self._reach and _joined(self._group, heads.device))
            if self._reach:
                return self._peers.buffers(heads)
        return self._host.buffers(heads) if may_go_through_host(heads.device) else None


def peers_are_near(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether writing to each other's memory is worth a try. The same on all ranks of a pool."""
    if device.type != "cuda" or os.environ.get("NCCL_P2P_DISABLE", "0") != "0":
        return False
    return _one_host() and torch.cuda.device_count() >= group.size()


def may_go_through_host(device: torch.device) -> bool:
    """Whether the host's memory is worth a try where peers are not near. The same on all ranks of a pool."""
    return device.type == "cuda" and _one_host() and is_on("host")


def _one_host() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")


def _reach_one_another(group: dist.ProcessGroup, device: torch.device) -> bool:
    own, used = _own(device), _used(group, device)
    reached = all(torch.cuda.can_device_access_peer(own, index) for index in used if index != own)
    return all_agree(reached and len(used) == group.size(), group, device)


def _joined(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether kernels write to the others' memory: over PCIe, stores are many times slower than copy engines."""
    gpus = [torch.cuda.get_device_properties(index) for index in _used(group, device)]
    return all_agree(joined_by_nvlink(gpus), group, device)


def _used(group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """The group's GPUs. Collective over it."""
    unused = torch.ones(torch.cuda.device_count(), dtype=torch.int64, device=device)
    unused[_own(device)] = 0
    dist.all_reduce(unused, op=dist.ReduceOp.MIN, group=group)
    return [index for index, free in enumerate(unused.tolist()) if not free]


def _own(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@dataclass(frozen=True)
class HeadSharing:
    """Self-attention of a network on this rank, whose heads ranks may exchange over memory that they share."""

    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    kernel: str  # that attends, a key of KERNELS

    def fits(self, dtype: torch.dtype, heads: int, head_dim: int) -> bool:
        """Whether the buffers are for attention of this kind."""
        return (dtype, heads, head_dim) == (self.dtype, self.heads, self.head_dim)

    def buffers(self, mesh: Mesh, lengths: tuple[int, ...], batch: int) -> PeerBuffers | HostBuffers | None:
        """Return buffers for ranks of these lengths, None where they share no memory. Collective over the group."""
        if mesh.peers is None:
            return None
        heads = -(-self.heads // len(lengths)) * len(lengths)
        wanted = ExchangedHeads(lengths, batch, heads, self.head_dim, self.dtype, self.device)
        return mesh.peers.buffers(wanted)
