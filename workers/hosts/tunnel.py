"""Carries bytes between two connections, both ways: how other hosts reach the store, which listens on loopback only."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

PORT_FILE = "store-port"
"""In a pool's folder: names the port on loopback at which this host's ranks reach the store."""
_CHUNK = 1 << 16
_POLL_SECONDS = 0.05


async def join_ends(one: socket.socket, other: socket.socket) -> None:
    """Pass on what comes, until either side ends; then close both."""
    ways = [asyncio.ensure_future(_pass_on(one, other)), asyncio.ensure_future(_pass_on(other, one))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        one.close()
        other.close()


async def _pass_on(source: socket.socket, target: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):
        while data := await loop.sock_recv(source, _CHUNK):
            await loop.sock_sendall(target, data)


def listen_on_loopback() -> socket.socket:
    """A listener that nothing outside of this machine reaches, on a port that the kernel chooses."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(512)
    return listener


async def reach_loopback(port_file: Path) -> socket.socket:
    """Connect to the port that a file names, as soon as there is one.

    Raises:
        OSError: nobody listens there any more.
    """
    while (port := read_port(port_file)) is None:
        await asyncio.sleep(_POLL_SECONDS)
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    except OSError:
        sock.close()
        raise
    return sock


def write_port(port_file: Path, port: int) -> None:
    """Name a port, whole or not at all."""
    written = port_file.with_suffix(".new")
    written.write_text(str(port))
    written.replace(port_file)


def read_port(port_file: Path) -> int | None:
    """The port that a file names; None before it is there."""
    try:
        return int(port_file.read_text())
    except FileNotFoundError:
        return None
