"""Who is in a pool: its ranks, here and on other machines. The supervisor's side of their connections."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Coroutine
from typing import Any

from parallel_runtime.errors import ConfigurationError
from parallel_runtime.said import Said, said

from ..launch import PoolSpec
from ..pool_log import PoolLog
from ..processes import DUMP_STACKS
from ..wire.endpoint import Endpoint
from ..wire.frames import Frame
from ..wire.protocol import Hello, Message, Online
from .verdict import Blame


class Members:
    """Serves each connection until its end, which is a loss: nobody leaves a pool that goes on.

    Ranks of this machine have a connection each; rank 0's is that of the ranks on other machines as well.

    Args:
        on_frame: called with what a rank sent.
        on_loss: called with the sign that a lost connection is, and with who was lost, in words.
        on_unread: called before, with a rank that ended and had not read all that was sent to it.
    """

    def __init__(
        self,
        spec: PoolSpec,
        log: PoolLog,
        on_frame: Callable[[int, Frame], Coroutine[Any, Any, None]],
        on_loss: Callable[[Blame, Said], None],
        on_unread: Callable[[int], None],
    ):
        self.size = spec.world_size
        """Ranks of the pool."""
        self.pids: dict[int, int] = {}
        """Processes of this machine."""
        self.devices: dict[int, str] = {}
        """What each rank computes on; a rank is here once it is online."""
        self._spec = spec
        self._log = log
        self._on_frame = on_frame
        self._on_loss = on_loss
        self._on_unread = on_unread
        self._endpoints: dict[int, Endpoint] = {}
        self._hosts: dict[int, str] = {}

    @property
    def complete(self) -> bool:
        """Every rank is online."""
        return len(self.devices) == self.size

    @property
    def missing(self) -> Said:
        """Who did not come, in words."""
        if self._spec.hosts > 1 and not self._endpoints:  # torchrun starts no rank before all machines are there
            return said("Not all of the {hosts} hosts joined", hosts=self._spec.hosts)
        ranks = [rank for rank in range(self.size) if rank not in self.devices]
        return said("Workers {ranks} did not start", ranks=ranks)

    async def welcome(self, endpoint: Endpoint, hello: Hello, pid: int) -> None:
        """Serve a rank's connection until its end.

        Raises:
            ConfigurationError: another machine brings another number of ranks than this one.
        """
        rank = hello.rank
        if rank in self._endpoints or rank not in range(self.size):
            self._log.write(f"refused a connection from {endpoint.name}, which is no rank that is awaited")
            endpoint.socket.close()
            return
        if self._spec.hosts > 1 and hello.world_size != self.size:
            raise ConfigurationError(
                said("The hosts bring {count} workers, not {size}.", count=hello.world_size, size=self.size),
                said("Give {each} to --nproc-per-node on each of them.", each=len(self._spec.devices)),
            )
        self._endpoints[rank], self.pids[rank] = endpoint, pid
        while (frame := await endpoint.receive()) is not None:
            await self._on_frame(getattr(frame.message, "rank", rank), frame)
        if endpoint.left_unread:
            self._on_unread(rank)
        self._on_loss(Blame.RANK_ENDED, said("Worker {rank} (process {pid}) ended", rank=rank, pid=pid))

    def arrive(self, online: Online) -> None:
        """A rank has its device.

        Raises:
            ConfigurationError: another machine computes on something else than this one.
        """
        kind = online.device.split(":")[0]
        if kind != self._spec.device_type:
            raise ConfigurationError(
                said("Host {host} computes on {kind}, this one on {own}.",
                     host=online.host, kind=kind, own=self._spec.device_type),
                "See which GPUs torch finds there, and what CUDA_VISIBLE_DEVICES says.",
            )  # fmt: skip
        self.devices[online.rank] = online.device
        if online.host:
            self._hosts[online.rank] = online.host

    def lose(self, rank: int) -> None:
        """Rank 0 says that this one, on another machine, is gone."""
        self._on_loss(Blame.HOST_LOST, said("Worker {rank} on host {host} was lost", rank=rank, host=self._host(rank)))

    def stalled(self, rank: int, seconds: float) -> Said:
        """That a rank does not get on, in words."""
        value = f"{seconds:.0f}"
        if rank in self.pids:
            template = "Worker {rank} (process {pid}) made no progress for {seconds} seconds"
            return said(template, rank=rank, pid=self.pids[rank], seconds=value)
        template = "Worker {rank} on host {host} made no progress for {seconds} seconds"
        return said(template, rank=rank, host=self._host(rank), seconds=value)

    def _host(self, rank: int) -> str:
        return self._hosts.get(rank, "?")

    @property
    def hung_up(self) -> bool:
        """A rank of this machine has ended, of which `on_loss` may not be told yet."""
        return any(endpoint.hung_up for endpoint in self._endpoints.values())

    async def tell(self, message: Message) -> None:
        """Send a message to every rank of the pool; rank 0 passes it on to other machines."""
        for endpoint in list(self._endpoints.values()):
            await endpoint.send(message)

    async def hand_out(self, job: Frame) -> None:
        """Pass a job on as it came: its header to every rank, its payload to rank 0 alone."""
        for rank, endpoint in list(self._endpoints.items()):
            await endpoint.forward(job, with_payload=rank == 0)

    def dump_stacks(self) -> None:
        """Let every rank of this machine write its stacks to the log."""
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, DUMP_STACKS)
