"""Strangers on the network, however many, cost the pool neither its life nor its members' connections."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from tests.patience import wait_until
from workers.hosts.handshake import introduce
from workers.hosts.network import Network, listen
from workers.supervisor import reception
from workers.wire.connection import Connection
from workers.wire.protocol import Join

SECRET = b"a secret of some length"


@contextmanager
def receiving() -> Iterator[tuple[tuple[str, int], list[Any], list[str]]]:
    """A reception in a thread: its address, the guests it let in, and what it wrote to the log."""
    guests: list[Any] = []
    written: list[str] = []
    ready = threading.Event()
    where: list[tuple[str, int]] = []
    stop: list[Callable[[], Any]] = []

    async def serve() -> None:
        tasks: set[asyncio.Future[None]] = set()

        def watch(work: Any) -> asyncio.Future[None]:
            task = asyncio.ensure_future(work)
            tasks.add(task)
            return task

        async def welcome(guest: Any) -> None:
            guests.append(guest)

        log: Any = SimpleNamespace(write=written.append)
        listener = listen(Network("127.0.0.1", 0, SECRET))
        where.append(listener.getsockname())
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(ended.set))
        accepting = watch(reception.Reception(log, welcome, watch).remote(listener, SECRET))
        ready.set()
        await ended.wait()
        assert not accepting.done()
        for task in tasks:
            task.cancel()
        listener.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(60)
    try:
        yield where[0], guests, written
    finally:
        stop[0]()
        thread.join(60)
        for guest in guests:
            guest.endpoint.socket.close()


def join(address: tuple[str, int]) -> socket.socket:
    sock = socket.create_connection(address, timeout=60)
    introduce(sock, SECRET, "there")
    Connection(sock).send(Join("host", 1, 1))
    return sock


def is_held(stranger: socket.socket) -> bool:
    """Whether the other side has not hung up."""
    try:
        while stranger.recv(100, socket.MSG_DONTWAIT):
            pass
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def test_members_come_in_while_strangers_hold_every_place():
    with receiving() as (address, guests, _):
        strangers = [socket.create_connection(address) for _ in range(4 * reception.MOST_UNPROVEN)]
        with join(address):
            assert wait_until(lambda: len(guests) == 1)
        assert wait_until(lambda: sum(map(is_held, strangers)) <= reception.MOST_UNPROVEN)
        for stranger in strangers:
            stranger.close()


def test_a_flood_from_one_host_turns_out_its_own_connections_and_not_those_of_others():
    async def play() -> None:
        never: Any = None
        door = reception.Reception(never, never, never)
        sleeping = [asyncio.ensure_future(asyncio.sleep(60)) for _ in range(4)]
        door._unproven = dict(zip(sleeping, ("member", "flood", "flood", "flood"), strict=True))  # type: ignore[arg-type]
        door._turn_away()
        door._turn_away()
        await asyncio.sleep(0)
        assert [task.cancelled() for task in sleeping] == [False, True, True, False]
        for task in sleeping:
            task.cancel()

    asyncio.run(play())


def test_descriptors_that_run_out_are_waited_for(monkeypatch):
    monkeypatch.setattr(reception, "MOST_UNPROVEN", 10**6)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with receiving() as (address, guests, written):
        strangers: list[socket.socket] = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
        try:
            with contextlib.suppress(OSError):
                while True:
                    strangers.append(socket.create_connection(address))
            assert wait_until(lambda: any("Too many open files" in line for line in written))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        with join(address):
            assert wait_until(lambda: len(guests) == 1)
        for stranger in strangers:
            stranger.close()
