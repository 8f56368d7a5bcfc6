"""Who is in a pool: its ranks, and the other hosts that offered theirs. The supervisor's side of their connections."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from parallel_runtime.said import Said, said

from ..hosts.tunnel import PORT_FILE, join_ends, reach_loopback
from ..launch import PoolSpec
from ..pool_log import PoolLog
from ..processes import DUMP_STACKS
from ..wire.frames import Frame
from ..wire.protocol import Join, Message, StartRanks, StoreLink
from .reception import Guest
from .verdict import Blame


class Members:
    """Serves each connection until its end, which is a loss: nobody leaves a pool that goes on.

    Args:
        directory: the pool's, where rank 0 says where the store is.
        rank_module: what torchrun starts in each rank.
        on_frame: called with what a rank sent, and its number.
        on_loss: called with the sign that a lost connection is, and with who was lost, in words.
        on_unread: called before, with a rank that ended and had not read all that was sent to it.
    """

    def __init__(
        self,
        spec: PoolSpec,
        directory: Path,
        rank_module: str,
        log: PoolLog,
        on_frame: Callable[[int, Frame], Coroutine[Any, Any, None]],
        on_loss: Callable[[Blame, Said], None],
        on_unread: Callable[[int], None],
    ):
        self.size = spec.world_size
        """Ranks of the pool."""
        self.pids: dict[int, int] = {}
        self.devices: dict[int, str] = {}
        """What each rank computes on; a rank is here once it is online."""
        self._spec = spec
        self._directory = directory
        self._rank_module = rank_module
        self._log = log
        self._on_frame = on_frame
        self._on_loss = on_loss
        self._on_unread = on_unread
        self._ranks: dict[int, Guest] = {}
        self._hosts: list[str] = []

    @property
    def complete(self) -> bool:
        """Every rank is online."""
        return len(self.devices) == self.size

    @property
    def missing(self) -> Said:
        """Who did not come, in words."""
        absent = self._spec.hosts - 1 - len(self._hosts)
        if absent:
            return said("{count} of {hosts} hosts did not join", count=absent, hosts=self._spec.hosts)
        ranks = [rank for rank in range(self.size) if rank not in self.devices]
        return said("Ranks {ranks} did not start", ranks=ranks)

    async def welcome(self, guest: Guest) -> None:
        """Serve a connection that the reception let in, until its end."""
        if isinstance(guest.hello, StoreLink):
            await self._serve_store(guest)
        elif isinstance(guest.hello, Join):
            await self._serve_host(guest, guest.hello)
        elif guest.hello.rank in self._ranks or guest.hello.rank not in range(self.size):
            self._log.write(f"refused a connection from {guest.endpoint.name}, which is no rank that is awaited")
            guest.endpoint.socket.close()
        else:
            await self._serve_rank(guest, guest.hello.rank)

    async def _serve_rank(self, guest: Guest, rank: int) -> None:
        self._ranks[rank], self.pids[rank] = guest, guest.pid
        while (frame := await guest.endpoint.receive()) is not None:
            await self._on_frame(rank, frame)
        if guest.endpoint.left_unread:
            self._on_unread(rank)
        where = said("Rank {rank} (process {pid}) ended", rank=rank, pid=guest.pid)
        if guest.host:
            where = said("Rank {rank} (process {pid} on {host}) ended", rank=rank, pid=guest.pid, host=guest.host)
        self._on_loss(Blame.RANK_ENDED, where)

    async def _serve_host(self, guest: Guest, join: Join) -> None:
        node, ranks = len(self._hosts) + 1, len(self._spec.devices)
        if node >= self._spec.hosts or join.devices != ranks:
            self._log.write(f"refused host {join.name} ({guest.host}) with {join.devices} devices")
            guest.endpoint.socket.close()
            return
        self._hosts.append(join.name)
        await guest.endpoint.send(StartRanks(node, self._spec.hosts, ranks, self._spec.device_type, self._rank_module))
        await guest.endpoint.receive()  # it says nothing more: this returns at its end
        self._on_loss(Blame.HOST_LOST, said("Host {name} ({address}) dropped off", name=join.name, address=guest.host))

    async def _serve_store(self, guest: Guest) -> None:
        """Its end is no loss: a rank opens and closes such connections as it likes."""
        try:
            await join_ends(guest.endpoint.socket, await reach_loopback(self._directory / PORT_FILE))
        except OSError as error:
            self._log.write(f"the store could not be reached for {guest.host}: {error}")
            guest.endpoint.socket.close()

    @property
    def hung_up(self) -> bool:
        """A rank of the pool has ended, of which `on_loss` may not be told yet."""
        return any(guest.endpoint.hung_up for guest in self._ranks.values())

    async def tell(self, message: Message) -> None:
        """Send a message to every rank of the pool."""
        for guest in list(self._ranks.values()):
            await guest.endpoint.send(message)

    async def hand_out(self, job: Frame) -> None:
        """Pass a job on as it came: its header to every rank, its payload to rank 0 alone."""
        for rank, guest in list(self._ranks.items()):
            await guest.endpoint.forward(job, with_payload=rank == 0)

    def dump_stacks(self) -> None:
        """Let every rank of this host write its stacks to the log."""
        for guest in self._ranks.values():
            if not guest.host:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(guest.pid, DUMP_STACKS)
