"""The rank process, from torchrun's start to its main loop.

Three threads: the main one works; one receives, so that a cancel or the supervisor's end is seen in the middle of a
job; one sends a heartbeat.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from parallel_runtime.engine.engine import Engine
from parallel_runtime.errors import UnsupportedModelError
from parallel_runtime.networks.diffusers.lean_imports import leave_out_unused_packages

from ..launch import PoolSpec
from ..processes import DUMP_STACKS, die_with_parent
from ..wire.connection import Connection
from ..wire.protocol import Hello, Online
from ..wire.unix_socket import connect_in
from .elsewhere import host_name, is_elsewhere, link_ranks, make_environment
from .laps import Laps
from .output import RankOutput
from .rank import Rank
from .world import World

log = logging.getLogger("rank")


def device_name(device: torch.device) -> str:
    """What the status shows for a rank."""
    return f"cuda:{device.index} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "cpu"


def main(make_engine: Callable[[torch.device, int, int], Engine] = Engine) -> None:
    """Process entry, under torchrun. `make_engine(device, rank, world_size)` lets tests put faults in."""
    die_with_parent(os.getppid())
    with contextlib.suppress(UnsupportedModelError):  # no diffusers: a model that needs it says so
        leave_out_unused_packages()
    elsewhere = is_elsewhere(os.environ)
    if elsewhere:
        make_environment(os.environ)
    spec, number = PoolSpec.parse(os.environ["PARALLEL_DIT_DEVICES"]), int(os.environ["RANK"])
    folder = Path(os.environ["PARALLEL_DIT_POOL"])
    output = RankOutput.install(number)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(name)s: %(message)s")
    laps = Laps.of_process()
    laps.end("Python and imports")
    faulthandler.enable()
    faulthandler.register(DUMP_STACKS, all_threads=True)
    connection = None if elsewhere else Connection(connect_in(folder))
    if connection is not None:
        connection.send(Hello(number, os.getpid(), int(os.environ["WORLD_SIZE"])))
    torch.set_grad_enabled(False)
    laps.end("connection")
    world = World(spec, number, int(os.environ["LOCAL_RANK"]), folder)
    world.take_device()
    world.enter()
    laps.end("device and group")
    engine = make_engine(world.device, number, spec.world_size)
    link = link_ranks(spec, number, connection) if spec.hosts > 1 else connection
    assert link is not None
    laps.end("engine")
    rank = Rank(link, engine, output, spec.hosts == 1, laps.total)
    log.info("start: %s", laps)
    threading.Thread(target=rank.inbox.receive, name="receive", daemon=True).start()
    threading.Thread(target=rank.heartbeat.beat, name="heartbeat", daemon=True).start()
    link.send(Online(number, device_name(world.device), host_name(os.environ) if elsewhere else ""))
    rank.work()
    os._exit(1)  # it can do no more: interpreter and libraries may want what there is none of
