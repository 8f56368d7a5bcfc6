"""The rank process, from torchrun's start to its main loop.

Three threads: the main one works; one receives, so that a cancel or the supervisor's end is seen in the middle of a
job; one sends a heartbeat.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from parallel_runtime.engine.engine import Engine
from parallel_runtime.errors import UnsupportedModelError
from parallel_runtime.networks.diffusers.lean_imports import leave_out_unused_packages

from ..hosts.handshake import introduce, keep_alive
from ..hosts.network import parse_address, read_secret, secret_path
from ..launch import PoolSpec, take_place
from ..processes import DUMP_STACKS, die_with_parent
from ..wire.connection import Connection
from ..wire.protocol import Hello, Online
from ..wire.unix_socket import connect_in
from .laps import Laps
from .output import RankOutput
from .rank import Rank
from .world import World

CONNECT_SECONDS = 10.0

log = logging.getLogger("rank")


def connect(environment: Mapping[str, str]) -> Connection:
    """Connect back to the supervisor: over its Unix socket, or from another host with the shared secret."""
    main = environment.get("PARALLEL_DIT_MAIN")
    if main is None:
        return Connection(connect_in(Path(environment["PARALLEL_DIT_POOL"])))
    sock = socket.create_connection(parse_address(main), timeout=CONNECT_SECONDS)
    introduce(sock, read_secret(secret_path(environment)), main)
    keep_alive(sock)
    return Connection(sock)


def device_name(device: torch.device) -> str:
    """What the status shows for a rank."""
    return f"cuda:{device.index} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "cpu"


def main(make_engine: Callable[[torch.device, int, int], Engine] = Engine) -> None:
    """Process entry, under torchrun. `make_engine(device, rank, world_size)` lets tests put faults in."""
    die_with_parent(os.getppid())
    with contextlib.suppress(UnsupportedModelError):  # no diffusers: a model that needs it says so
        leave_out_unused_packages()
    spec = PoolSpec.parse(os.environ["PARALLEL_DIT_DEVICES"])
    number = take_place(spec, os.environ)
    output = RankOutput.install(number)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(name)s: %(message)s")
    laps = Laps.of_process()
    laps.end("Python and imports")
    faulthandler.enable()
    faulthandler.register(DUMP_STACKS, all_threads=True)
    connection = connect(os.environ)
    connection.send(Hello(number, os.getpid()))
    torch.set_grad_enabled(False)
    laps.end("connection")
    world = World(spec, number, int(os.environ["LOCAL_RANK"]), Path(os.environ["PARALLEL_DIT_POOL"]))
    world.take_device()
    world.enter()
    laps.end("device and group")
    engine = make_engine(world.device, number, spec.world_size)
    laps.end("engine")
    rank = Rank(connection, engine, output, spec.hosts == 1, laps.total)
    log.info("start: %s", laps)
    threading.Thread(target=rank.inbox.receive, name="receive", daemon=True).start()
    threading.Thread(target=rank.heartbeat.beat, name="heartbeat", daemon=True).start()
    connection.send(Online(number, device_name(world.device)))
    rank.work()
    os._exit(1)  # it can do no more: interpreter and libraries may want what there is none of
