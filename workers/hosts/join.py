"""Gives this machine's devices to a pool on another host: `python -m workers.hosts.join ADDRESS:PORT`.

Runs until it is stopped. It waits for the pool to start, starts torchrun for this node of it, ends that with the
pool, and waits for the next. Both hosts need the same secret file, and the model files under the same paths.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import ParallelError

from ..launch import NODE, PACK_ROOT, PoolSpec, rank_environment, resolve_devices, torchrun_command
from ..leftovers import private_folder
from ..processes import become_subreaper, end_descendants, spawn, wait_for_end
from ..wire.endpoint import Endpoint
from ..wire.frames import FrameError
from ..wire.protocol import Join, StartRanks, StoreLink
from .handshake import WrongSecret, introduce, keep_alive
from .network import SECRET_FILE, interface_of, parse_address, read_secret, secret_path
from .tunnel import PORT_FILE, join_ends, listen_on_loopback, write_port

RETRY_SECONDS = 1.0
CONNECT_SECONDS = 5.0
EXIT_GRACE_SECONDS = 2.0


@dataclass(frozen=True)
class Membership:
    """What this host offers, and to whom."""

    main: str
    secret: bytes
    spec: PoolSpec


def connect(membership: Membership) -> socket.socket:
    """Connect to the pool's first host and prove the secret.

    Raises:
        OSError: nobody listens there yet.
        WrongSecret: the secrets differ.
    """
    sock = socket.create_connection(parse_address(membership.main), timeout=CONNECT_SECONDS)
    introduce(sock, membership.secret, membership.main)
    keep_alive(sock)
    return sock


async def serve_one_pool(membership: Membership, sock: socket.socket) -> str:
    """Be a node of one pool, to its end; return why it ended."""
    interface = interface_of(sock.getsockname()[0])
    endpoint = Endpoint(sock, membership.main)
    await endpoint.send(Join(socket.gethostname(), len(membership.spec.devices), os.getpid()))
    frame = await endpoint.receive()
    if frame is None or not isinstance(frame.message, StartRanks):
        return "the pool did not want this host (it may have enough, or want another number of devices)"
    start = frame.message
    spec = PoolSpec(membership.spec.device_type, membership.spec.devices, start.hosts)
    with private_folder() as folder, listen_on_loopback() as store:
        environment = rank_environment(spec, folder, os.environ, interface)
        environment |= {"PARALLEL_DIT_MAIN": membership.main, NODE: str(start.node)}
        torchrun = await spawn(torchrun_command(spec, folder, start.rank_module), environment, str(PACK_ROOT))
        write_port(folder / PORT_FILE, store.getsockname()[1])
        works = (endpoint.receive(), wait_for_end(torchrun), _show(torchrun), _reach_store(membership, store))
        waits = [asyncio.ensure_future(work) for work in works]
        try:
            await asyncio.wait(waits[:2], return_when=asyncio.FIRST_COMPLETED)
            ended = "the pool ended" if waits[0].done() else f"torchrun ended with code {torchrun.returncode}"
        finally:
            await end_descendants(EXIT_GRACE_SECONDS)
            await torchrun.wait()
            for wait in waits:
                wait.cancel()
            endpoint.socket.close()
    return ended


async def _reach_store(membership: Membership, listener: socket.socket) -> None:
    """Give this host's ranks a port on loopback that leads to the store of the pool's first host."""
    listener.setblocking(False)
    links: set[asyncio.Task[None]] = set()
    try:
        while True:
            near, _ = await asyncio.get_running_loop().sock_accept(listener)
            link = asyncio.ensure_future(_link(membership, near))
            links.add(link)
            link.add_done_callback(links.discard)
    finally:
        for link in links:
            link.cancel()


async def _link(membership: Membership, near: socket.socket) -> None:
    with near:
        try:
            far = await asyncio.to_thread(connect, membership)
        except (OSError, WrongSecret) as error:
            print(f"the pool's store cannot be reached: {error}", file=sys.stderr)
            return
        await Endpoint(far, membership.main).send(StoreLink())
        await join_ends(near, far)


async def _show(torchrun: asyncio.subprocess.Process) -> None:
    assert torchrun.stdout is not None
    while line := await torchrun.stdout.readline():
        sys.stderr.write(line.decode(errors="replace"))


async def serve(membership: Membership) -> None:
    """Serve one pool after the other, for ever."""
    waiting = False
    while True:
        try:
            sock = await asyncio.to_thread(connect, membership)
        except OSError:
            if not waiting:
                print(f"waiting for a pool at {membership.main}", flush=True)
                waiting = True
        else:
            waiting = False
            print(f"joined the pool at {membership.main} with {membership.spec}", flush=True)
            try:
                print(await serve_one_pool(membership, sock), flush=True)
            except FrameError as error:
                print(error, flush=True)
        await asyncio.sleep(RETRY_SECONDS)


def _gpu_count() -> int:
    import torch

    return torch.cuda.device_count()


def main() -> int:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("main", metavar="ADDRESS:PORT", help="what $PARALLEL_DIT_LISTEN is on the first host")
    parser.add_argument("--devices", default="auto", help="auto, GPU numbers such as 0,1, or cpu:2")
    parser.add_argument("--secret-file", type=Path, default=secret_path(os.environ))
    arguments = parser.parse_args()
    os.environ[SECRET_FILE] = str(arguments.secret_file)  # the ranks read it too
    become_subreaper()
    try:
        parse_address(arguments.main)
        spec = resolve_devices(ParallelConfig(devices=arguments.devices), _gpu_count)
        membership = Membership(arguments.main, read_secret(arguments.secret_file), spec)
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(serve(membership))
    except ParallelError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
