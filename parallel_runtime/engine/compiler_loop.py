"""What compiler processes have in common: a model first, then calls, each answered when its graphs are made."""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec
import torch

from ..acceleration.compiler import join_nobody
from ..acceleration.compiler_messages import Call, HostToCompile, Outcome, ToCompile
from ..acceleration.swap import imported_modules

_NICENESS = 5
_Told = TypeVar("_Told", ToCompile, HostToCompile)
_Built = TypeVar("_Built")


def serve(
    kind: type[_Told],
    build: Callable[[_Told, torch.device], _Built],
    run: Callable[[_Built, Call, torch.device], None],
) -> None:
    """Process entry: the first argument is the socket's descriptor. Ends with the rank.

    Args:
        kind: of the model.
        build: the model, with the memory of one block of each kind.
        run: makes the graphs of a call, by calling.
    """
    os.nice(_NICENESS)
    connection = socket.socket(fileno=int(sys.argv[1]))
    calls = _receive(connection)
    model = msgspec.json.decode(next(calls), type=kind)
    torch.set_grad_enabled(False)
    device = torch.device(model.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if model.world_size > 1:
        join_nobody(model.rank, model.world_size)
    built = build(model, device)
    for line in calls:
        call = msgspec.json.decode(line, type=Call)
        failure = ""
        try:
            run(built, call, device)
        except Exception as error:  # noqa: BLE001 - process border: told to the rank, which stays as it is
            failure = f"{type(error).__name__}: {error}".strip()
        connection.sendall(msgspec.json.encode(Outcome(call.number, failure, imported_modules())) + b"\n")


def _receive(connection: socket.socket) -> Iterator[bytes]:
    """Lines as they come. The rank's end of the socket is this process's end, in the middle of whatever it does."""
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        with connection.makefile("rb") as stream:
            for line in stream:
                inbox.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield inbox.get()
