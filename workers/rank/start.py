"""The rank process, from its start to its main loop. Its main thread works; one receives, so that a cancel or the
supervisor's end is seen in the middle of a job; one sends a heartbeat."""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import torch

from parallel_runtime.engine.engine import Engine
from parallel_runtime.requests.comfyui_code import ComfyuiCode

from ..launch import EXPECTED_COMFYUI, PoolSpec, own_address
from ..leftovers import DUMP_STACKS, die_with_parent
from ..wire.connection import Connection, connect_in
from ..wire.protocol import Hello, Online
from .joining import join, link_ranks, make_environment, take_device
from .rank import Rank

log = logging.getLogger("rank")


def main(make_engine: Callable[[torch.device, int, int], Engine] = Engine) -> None:
    """Process entry, in the environment that torchrun gives, or the supervisor in its words. `make_engine(device, rank,
    world_size)` lets tests put faults in."""
    die_with_parent(os.getppid())
    elsewhere = "PARALLEL_DIT_POOL" not in os.environ  # no supervisor has started this rank
    if elsewhere:
        make_environment(os.environ)
    spec, number = PoolSpec.parse(os.environ["PARALLEL_DIT_DEVICES"]), int(os.environ["RANK"])
    folder = Path(os.environ["PARALLEL_DIT_POOL"])
    prefix = f"[rank {number}] " if spec.hosts > 1 else ""  # on one machine the supervisor puts it there
    logging.basicConfig(level=logging.INFO, format=f"{prefix}%(name)s: %(message)s")
    times = [psutil.Process().create_time(), time.time()]
    faulthandler.enable()
    faulthandler.register(DUMP_STACKS, all_threads=True)
    connection = None if elsewhere else Connection(connect_in(folder))
    if connection is not None:
        connection.send(Hello(number, int(os.environ["WORLD_SIZE"])))
    torch.set_grad_enabled(False)
    times.append(time.time())
    device = take_device(spec, int(os.environ["LOCAL_RANK"]))
    if spec.world_size > 1:  # one rank alone needs no group
        join(spec, number, device, folder)
    times.append(time.time())
    engine = make_engine(device, number, spec.world_size)
    link = link_ranks(spec, number, connection) if spec.hosts > 1 else connection
    assert link is not None
    times.append(time.time())
    expected = os.environ.get(EXPECTED_COMFYUI)
    code = msgspec.json.decode(expected, type=ComfyuiCode) if expected else None
    rank = Rank(link, engine, spec.hosts == 1, code)
    parts = zip(("Python and imports", "connection", "device and group", "engine"), times, times[1:], strict=False)
    log.info("start: %s", ", ".join(f"{part} {end - begin:.1f} s" for part, begin, end in parts))
    threading.Thread(target=rank.inbox.receive, name="receive", daemon=True).start()
    threading.Thread(target=rank.heartbeat.beat, name="heartbeat", daemon=True).start()
    name = f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "cpu"
    host = f"{socket.gethostname()} ({own_address(os.environ['MASTER_ADDR'])})" if elsewhere else ""
    link.send(Online(number, name, host))
    rank.work()
    os._exit(1)  # it can do no more: interpreter and libraries may want what there is none of
