"""What comes to a rank from the supervisor, and what it imports while nothing comes."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import queue
from collections.abc import Callable, Iterator
from functools import partial

import torch

from parallel_runtime.acceleration import compiler
from parallel_runtime.networks.comfyui.comfy_code import use_comfyui
from parallel_runtime.patching.comfyui_patches import MODULES
from parallel_runtime.requests.comfyui_code import ComfyuiCode

from ..wire.connection import ConnectionClosed
from ..wire.frames import Frame, FrameError
from ..wire.protocol import Abandon, Cancel, Run
from .elsewhere import Channel

LOADING = ("comfy.supported_models", "comfy.sd")
"""What the first network of ComfyUI's imports."""
QUIET_SECONDS = 0.5
"""So long after a job nothing is imported: a sampler's next step would be delayed."""

log = logging.getLogger("rank")


def import_ahead(device: torch.device, code: ComfyuiCode | None = None) -> Iterator[bool]:
    """Import what later jobs need and this rank has time for while it waits for one: the compiler, and ComfyUI's code
    if its networks and patches will be wanted, one part each time that this is asked for the next.

    The rank's own thread asks: two threads that import modules which import each other get half of them. A job that
    comes meanwhile waits for no more than the part at hand. No rank depends on another's.
    """
    parts: list[Callable[[], object]] = []
    if code is not None:  # before all else
        parts.append(partial(use_comfyui, code.folder, {**code.options, "cpu": device.type == "cpu"}))
        parts += (partial(importlib.import_module, name) for name in (*MODULES, *LOADING))
    if device.type == "cuda":
        parts += compiler.imports()
    for part in parts:
        try:
            part()
        except Exception as error:  # noqa: BLE001 - of other people's modules; the request that needs them says it
            log.info("importing ahead failed: %s: %s", type(error).__name__, error)
            return
        yield True
    if parts:
        log.info("What later jobs need is imported.")


class Inbox:
    """Filled by one thread, emptied by another."""

    def __init__(self, connection: Channel):
        self.cancelled: int | None = None
        """The job that was cancelled last."""
        self._connection = connection
        self._frames: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._quiet = 0.0  # how long nothing has to come before this rank imports

    def receive(self) -> None:
        """Receiver thread. The supervisor's end is this process's end, in the middle of whatever it does."""
        try:
            while True:
                frame = self._connection.receive()
                if isinstance(frame.message, Cancel):
                    self.cancelled = frame.message.number
                else:
                    self._frames.put(frame)
        except (ConnectionClosed, FrameError) as error:
            log.info("the supervisor is gone (%s)", error)
            os._exit(1)  # not 0: torchrun of another machine would wait for those of this one

    def next(self, imports: Iterator[bool]) -> Frame:
        """What comes next; this thread imports while nothing comes."""
        quiet, self._quiet = self._quiet, QUIET_SECONDS
        with contextlib.suppress(queue.Empty):
            return self._frames.get(timeout=quiet)
        while next(imports, False):
            with contextlib.suppress(queue.Empty):
                return self._frames.get(block=False)
        return self._frames.get()

    def verdict(self, number: int) -> Run | Abandon:
        """What the supervisor decides of a job that this rank has prepared."""
        while True:
            message = self._frames.get().message
            if isinstance(message, (Run, Abandon)) and message.number == number:
                return message
