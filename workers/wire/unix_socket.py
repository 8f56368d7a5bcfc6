"""The socket that ranks connect to, in the pool's private folder, however long that folder's path is.

The kernel takes 107 bytes as the path of a Unix socket, and $TMPDIR alone may have more. Through the descriptor of the
folder the path is short.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

_NAME = "ranks.socket"


def listen_in(folder: Path, backlog: int) -> socket.socket:
    """A non-blocking listener."""
    sock = _make(folder, lambda sock, path: sock.bind(path))
    sock.listen(backlog)
    sock.setblocking(False)
    return sock


def connect_in(folder: Path) -> socket.socket:
    """Connect to it.

    Raises:
        OSError: nobody listens there.
    """
    return _make(folder, lambda sock, path: sock.connect(path))


def _make(folder: Path, use: Callable[[socket.socket, str], None]) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        use(sock, f"/proc/self/fd/{descriptor}/{_NAME}")
    except OSError:
        sock.close()
        raise
    finally:
        os.close(descriptor)
    return sock
