"""Who may talk to the supervisor: the ranks and hosts of this pool, and nobody else."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..hosts.handshake import admit, keep_alive
from ..pool_log import PoolLog
from ..processes import is_descendant
from ..wire.endpoint import Endpoint
from ..wire.frames import FrameError
from ..wire.protocol import Hello, Join, StoreLink

HELLO_SECONDS = 10.0
ACCEPT_PAUSE_SECONDS = 0.2
MOST_UNPROVEN = 64
"""Connections at a time that have not proved to know the secret."""


@dataclass(frozen=True)
class Guest:
    """A connection that was let in.

    Args:
        hello: what it introduced itself as.
        pid: of its process, on its own host.
        host: "" for this host, else its address.
    """

    endpoint: Endpoint
    hello: Hello | Join | StoreLink
    pid: int
    host: str = ""


Welcome = Callable[[Guest], Coroutine[Any, Any, None]]


class Reception:
    """Accepts on the Unix socket (this host's ranks) and, with a secret, on TCP (other hosts and their ranks).

    A stranger is hung up on and costs the pool nothing. Many strangers at once cost it a bounded number of descriptors,
    and where descriptors run out all the same it accepts again as soon as there are some.
    """

    def __init__(self, log: PoolLog, welcome: Welcome, watch: Callable[[Coroutine[Any, Any, None]], Any]):
        self._log = log
        self._welcome = welcome
        self._watch = watch
        self._unproven: dict[asyncio.Task[None], str] = {}

    async def local(self, listener: socket.socket) -> None:
        """Take in processes of this user that the pool itself has started."""
        while True:
            connection, _ = await self._accept(listener)
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            pid, uid, _ = struct.unpack("3i", credentials)
            if uid != os.getuid():
                self._refuse(connection, f"user {uid} (pid {pid})")
            elif not is_descendant(pid):
                self._refuse(connection, f"pid {pid}, which this pool did not start")
            else:
                self._watch(self._greet(Endpoint(connection, f"pid {pid}"), pid, ""))

    async def remote(self, listener: socket.socket, secret: bytes) -> None:
        """Take in whoever proves to know the secret."""
        while True:
            connection, address = await self._accept(listener)
            connection.setblocking(False)
            if len(self._unproven) >= MOST_UNPROVEN:
                self._turn_away()
            task = self._watch(self._prove(connection, address[0], secret))
            self._unproven[task] = address[0]
            task.add_done_callback(partial(self._leave, connection))

    async def _accept(self, listener: socket.socket) -> tuple[socket.socket, tuple[str, int]]:
        failures = 0
        while True:
            try:
                return await asyncio.get_running_loop().sock_accept(listener)
            except OSError as error:  # descriptors or memory ran out, or the other side has hung up already
                if not failures:
                    self._log.write(f"cannot accept a connection now: {error}")
                failures += 1
                await asyncio.sleep(ACCEPT_PAUSE_SECONDS)

    def _turn_away(self) -> None:
        """Hang up on who waits longest of the host that has most connections: a flood turns out its own."""
        most, _ = Counter(self._unproven.values()).most_common(1)[0]
        oldest = next(task for task, host in self._unproven.items() if host == most)
        del self._unproven[oldest]
        oldest.cancel()

    def _leave(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._unproven.pop(task, None)
        if task.cancelled():  # perhaps before it began, so that it could not close it itself
            connection.close()

    async def _prove(self, connection: socket.socket, host: str, secret: bytes) -> None:
        if not await admit(connection, secret):
            self._refuse(connection, f"{host}, which does not know the secret")
            return
        task = asyncio.current_task()
        assert task is not None
        self._unproven.pop(task, None)
        keep_alive(connection)
        await self._greet(Endpoint(connection, host), None, host)

    async def _greet(self, endpoint: Endpoint, pid: int | None, host: str) -> None:
        try:
            frame = await asyncio.wait_for(endpoint.receive(), HELLO_SECONDS)
        except (FrameError, asyncio.TimeoutError) as error:
            self._refuse(endpoint.socket, f"{endpoint.name}: {error!r}")
            return
        hello = frame.message if frame is not None else None
        if not isinstance(hello, (Hello, Join, StoreLink)):
            self._refuse(endpoint.socket, f"{endpoint.name}, which did not say who it is")
            return
        own = 0 if isinstance(hello, StoreLink) else hello.pid
        await self._welcome(Guest(endpoint, hello, own if pid is None else pid, host))

    def _refuse(self, connection: socket.socket, who: str) -> None:
        self._log.write(f"refused a connection from {who}")
        connection.close()
