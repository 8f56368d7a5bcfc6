"""What comes to a rank from the supervisor, and what it imports while nothing comes."""

from __future__ import annotations

import importlib
import logging
import os
import queue
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import torch

from parallel_runtime.acceleration import compiler
from parallel_runtime.networks.comfyui.comfy_code import use_comfyui
from parallel_runtime.patching.comfyui_patches import MODULES
from parallel_runtime.requests.requests import ComfyuiCode

from ..wire.connection import ConnectionClosed, FrameError
from ..wire.frames import Frame
from ..wire.protocol import Abandon, Cancel, Run
from .elsewhere import Channel

LOADING = ("comfy.supported_models", "comfy.sd")
"""What the first network of ComfyUI's imports."""
QUIET_SECONDS = 0.5
"""So long after a job nothing is imported: a sampler's next step would be delayed."""

log = logging.getLogger("rank")


class IdleImports:
    """What later jobs need and this rank imports while it waits for one: the compiler, and ComfyUI's code.

    The rank's own thread does it, part by part: two threads that import modules which import each other get half of
    them. A job that comes meanwhile waits for no more than the part at hand. No rank depends on another's.

    Args:
        code: whose networks and patches will be wanted.
    """

    def __init__(self, device: torch.device, code: ComfyuiCode | None = None):
        self._left: deque[Callable[[], object]] = deque(compiler.imports() if device.type == "cuda" else ())
        if code is not None:  # before all else
            options = {**code.options, "cpu": device.type == "cpu"}
            wanted = [partial(importlib.import_module, name) for name in (*MODULES, *LOADING)]
            self._left.extendleft(reversed([partial(use_comfyui, code.folder, options), *wanted]))
        self._seconds = 0.0

    def __len__(self) -> int:
        return len(self._left)

    def next(self) -> None:
        """Import the next part."""
        part, started = self._left.popleft(), time.monotonic()
        try:
            part()
        except Exception as error:  # noqa: BLE001 - of other people's modules; the request that needs them says it
            self._left.clear()
            log.info("importing ahead failed: %s: %s", type(error).__name__, error)
            return
        self._seconds += time.monotonic() - started
        if not self._left:
            log.info("What later jobs need is imported, in %.1f s.", self._seconds)


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

    def next(self, imports: IdleImports) -> Frame:
        """What comes next; this thread imports while nothing comes."""
        quiet, self._quiet = self._quiet, QUIET_SECONDS
        while imports:
            try:
                return self._frames.get(timeout=quiet)
            except queue.Empty:
                imports.next()
                quiet = 0.0
        return self._frames.get()

    def verdict(self, number: int) -> Run | Abandon:
        """What the supervisor decides of a job that this rank has prepared."""
        while True:
            message = self._frames.get().message
            if isinstance(message, (Run, Abandon)) and message.number == number:
                return message
