"""Where the ranks of a pool meet. Nothing of it can be reached from outside of the machine.

On one host it is a file in the pool's private folder. Several hosts need a server: rank 0 has it, on loopback; ranks of
other hosts reach it through connections that have proved the secret (tunnel.py), as PyTorch's store itself knows none.
"""

from __future__ import annotations

import datetime
import time
from pathlib import Path

import torch.distributed as dist

from parallel_runtime.errors import PoolError

from ..launch import PoolSpec
from .tunnel import PORT_FILE, listen_on_loopback, read_port, write_port

_TIMEOUT = datetime.timedelta(minutes=5)


def open_store(spec: PoolSpec, folder: Path, rank: int) -> dist.Store:
    """The store of this pool.

    Args:
        folder: the pool's, on this host.

    Raises:
        PoolError: the server did not come.
    """
    if spec.hosts == 1:
        return dist.FileStore(str(folder / f"store-{spec.world_size}"), spec.world_size)  # each world has its own
    if rank > 0:
        return dist.TCPStore("127.0.0.1", _wait_for_port(folder), spec.world_size, timeout=_TIMEOUT)
    listener = listen_on_loopback()
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        spec.world_size,
        is_master=True,
        timeout=_TIMEOUT,
        wait_for_workers=False,
        # Given a socket, the store makes none of its own, which would listen on every interface.
        master_listen_fd=listener.detach(),
    )
    write_port(folder / PORT_FILE, port)
    return store


def _wait_for_port(folder: Path) -> int:
    until = time.monotonic() + _TIMEOUT.total_seconds()
    while (port := read_port(folder / PORT_FILE)) is None:
        if time.monotonic() > until:
            raise PoolError("Rank 0 did not open the store that the ranks meet at.", "Queue the prompt again.")
        time.sleep(0.02)
    return port
