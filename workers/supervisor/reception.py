"""Who may talk to the supervisor: the ranks of this pool that it has started itself, and nobody else."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import Any

from ..pool_log import PoolLog
from ..processes import is_descendant
from ..wire.endpoint import Endpoint
from ..wire.frames import FrameError
from ..wire.protocol import Hello

HELLO_SECONDS = 10.0
ACCEPT_PAUSE_SECONDS = 0.2
BACKLOG = 512
"""Connections that the kernel holds until they are accepted: no fewer when a pool is small."""


class Reception:
    """Accepts on the pool's Unix socket. A stranger is hung up on and costs the pool nothing.

    Args:
        welcome: called with a rank's connection, what it says it is, and the pid of its process.
        watch: has something go on beside.
    """

    def __init__(
        self,
        log: PoolLog,
        welcome: Callable[[Endpoint, Hello, int], Coroutine[Any, Any, None]],
        watch: Callable[[Coroutine[Any, Any, None]], Any],
    ):
        self._log = log
        self._welcome = welcome
        self._watch = watch

    async def open(self, listener: socket.socket) -> None:
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
                self._watch(self._greet(Endpoint(connection, f"pid {pid}"), pid))

    async def _accept(self, listener: socket.socket) -> tuple[socket.socket, Any]:
        failures = 0
        while True:
            try:
                return await asyncio.get_running_loop().sock_accept(listener)
            except OSError as error:  # descriptors or memory ran out, or the other side has hung up already
                if not failures:
                    self._log.write(f"cannot accept a connection now: {error}")
                failures += 1
                await asyncio.sleep(ACCEPT_PAUSE_SECONDS)

    async def _greet(self, endpoint: Endpoint, pid: int) -> None:
        try:
            frame = await asyncio.wait_for(endpoint.receive(), HELLO_SECONDS)
        except (FrameError, asyncio.TimeoutError) as error:
            self._refuse(endpoint.socket, f"{endpoint.name}: {error!r}")
            return
        if frame is None or not isinstance(frame.message, Hello):
            self._refuse(endpoint.socket, f"{endpoint.name}, which did not say who it is")
            return
        await self._welcome(endpoint, frame.message, pid)

    def _refuse(self, connection: socket.socket, who: str) -> None:
        self._log.write(f"refused a connection from {who}")
        connection.close()
