"""Both sides of a connection between hosts prove that they know the shared secret, without sending it.

    server -> client   magic, 32 random bytes
    client -> server   32 random bytes, HMAC-SHA256(secret, "client" + both)
    server -> client   HMAC-SHA256(secret, "server" + both)

It guards who may talk, not what others on the network can read: use it on a network you trust.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import socket

from parallel_runtime.errors import PoolError

GREETING = b"PDiT-join-1\n"
SECONDS = 5.0
_RANDOM = 32
_PROOF = 32


class WrongSecret(PoolError):
    """The other side does not know the secret, or is no Parallel DiT at all."""

    def __init__(self, where: str):
        super().__init__(
            f"{where} does not prove that it knows the shared secret.",
            "Give both hosts the same secret file, and check the address.",
        )


def _proof(secret: bytes, role: bytes, both: bytes) -> bytes:
    return hmac.new(secret, role + both, hashlib.sha256).digest()


async def admit(sock: socket.socket, secret: bytes) -> bool:
    """The server's side, on a non-blocking socket; False for a stranger, who is told nothing."""
    loop = asyncio.get_running_loop()

    async def exchange() -> bool:
        challenge = os.urandom(_RANDOM)
        await loop.sock_sendall(sock, GREETING + challenge)
        answer = b""
        while len(answer) < _RANDOM + _PROOF:
            part = await loop.sock_recv(sock, _RANDOM + _PROOF - len(answer))
            if not part:
                return False
            answer += part
        both = challenge + answer[:_RANDOM]
        if not hmac.compare_digest(answer[_RANDOM:], _proof(secret, b"client", both)):
            return False
        await loop.sock_sendall(sock, _proof(secret, b"server", both))
        return True

    try:
        return await asyncio.wait_for(exchange(), SECONDS)
    except (asyncio.TimeoutError, OSError):
        return False


def introduce(sock: socket.socket, secret: bytes, where: str) -> None:
    """The client's side, on a blocking socket.

    Raises:
        WrongSecret: the server hung up, or could not prove itself.
        OSError: the network failed.
    """
    sock.settimeout(SECONDS)
    greeting = _read(sock, len(GREETING) + _RANDOM, where)
    if not greeting.startswith(GREETING):
        raise WrongSecret(where)
    own = os.urandom(_RANDOM)
    both = greeting[len(GREETING) :] + own
    sock.sendall(own + _proof(secret, b"client", both))
    if not hmac.compare_digest(_read(sock, _PROOF, where), _proof(secret, b"server", both)):
        raise WrongSecret(where)
    sock.settimeout(None)


def _read(sock: socket.socket, count: int, where: str) -> bytes:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise WrongSecret(where)
        data += part
    return data


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel notice within about ten seconds that the other host is gone, also where nothing is sent."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
