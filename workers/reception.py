"""Who may talk to the supervisor: the ranks and hosts of this pool, and nobody else."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from .frames import FrameError
from .handshake import admit, keep_alive
from .peer import Peer
from .pool_log import PoolLog
from .processes import is_descendant
from .protocol import Hello, Join

HELLO_SECONDS = 10.0


@dataclass(frozen=True)
class Guest:
    """A connection that was let in.

    Args:
        hello: what it introduced itself as.
        pid: of its process, on its own host.
        host: "" for this host, else its address.
    """

    peer: Peer
    hello: Hello | Join
    pid: int
    host: str = ""


Welcome = Callable[[Guest], Coroutine[Any, Any, None]]


class Reception:
    """Accepts on the Unix socket (this host's ranks) and, with a secret, on TCP (other hosts and their ranks).

    A stranger is hung up on and costs the pool nothing.
    """

    def __init__(self, log: PoolLog, welcome: Welcome, watch: Callable[[Coroutine[Any, Any, None]], Any]):
        self._log = log
        self._welcome = welcome
        self._watch = watch

    async def local(self, listener: socket.socket) -> None:
        """Take in processes of this user that the pool itself has started."""
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(listener)
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            pid, uid, _ = struct.unpack("3i", credentials)
            if uid != os.getuid():
                self._refuse(connection, f"user {uid} (pid {pid})")
            elif not is_descendant(pid):
                self._refuse(connection, f"pid {pid}, which this pool did not start")
            else:
                self._watch(self._greet(Peer(connection, f"pid {pid}"), pid, ""))

    async def remote(self, listener: socket.socket, secret: bytes) -> None:
        """Take in whoever proves to know the secret."""
        loop = asyncio.get_running_loop()
        while True:
            connection, address = await loop.sock_accept(listener)
            connection.setblocking(False)
            self._watch(self._prove(connection, address[0], secret))

    async def _prove(self, connection: socket.socket, host: str, secret: bytes) -> None:
        if not await admit(connection, secret):
            self._refuse(connection, f"{host}, which does not know the secret")
            return
        keep_alive(connection)
        await self._greet(Peer(connection, host), None, host)

    async def _greet(self, peer: Peer, pid: int | None, host: str) -> None:
        try:
            frame = await asyncio.wait_for(peer.receive(), HELLO_SECONDS)
        except (FrameError, asyncio.TimeoutError) as error:
            self._refuse(peer.socket, f"{peer.name}: {error!r}")
            return
        hello = frame.message if frame is not None else None
        if not isinstance(hello, (Hello, Join)):
            self._refuse(peer.socket, f"{peer.name}, which did not say who it is")
            return
        await self._welcome(Guest(peer, hello, hello.pid if pid is None else pid, host))

    def _refuse(self, connection: socket.socket, who: str) -> None:
        self._log.write(f"refused a connection from {who}")
        connection.close()
