"""Imports what weight patches are computed with while this rank has nothing to do, so that the first LoRA need not.

ComfyUI's code and what it imports take seconds. They are imported in a thread of their own, a module at a time, and
only between jobs: of a job that comes meanwhile, no more than the module at hand is in the way. Nothing that ranks have
in common depends on it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import logging
import sys
import threading
import time
from collections.abc import Sequence
from types import ModuleType

import torch

from parallel_runtime.errors import ConfigurationError
from parallel_runtime.networks.comfyui.host_code import use_comfyui
from parallel_runtime.patching.comfyui_patches import MODULES
from parallel_runtime.requests.requests import ComfyuiCode, Forward, KeepPatches, Load, Request, Sample

QUIET_SECONDS = 0.5
"""So long after a job nothing is imported: a sampler's next step would be delayed."""
_LOOK_SECONDS = 0.02
_IMPORTING = "<frozen importlib._bootstrap>"

log = logging.getLogger("rank")


class IdleImports:
    """One of a rank."""

    def __init__(self, device: torch.device):
        self._device = device
        self._busy = True
        self._rested = 0.0
        self._code: ComfyuiCode | None = None
        self._begun = False

    def rest(self) -> None:
        """This rank waits for a job from now on."""
        self._rested = time.monotonic()
        self._busy = False

    def work(self) -> None:
        """It has one."""
        self._busy = True

    def after(self, request: Request) -> None:
        """A request was answered: begin with the first picture, which the start of a pool is to come to soonest; or at
        a LoRA, which is about to come."""
        if self._begun:
            return
        if isinstance(request, Load):
            self._code = request.patching or request.comfyui or self._code
        elif isinstance(request, KeepPatches):
            self._code = request.comfyui
        if self._code is not None and isinstance(request, (Forward, Sample, KeepPatches)):
            self._begun = True
            threading.Thread(target=self._import, args=(self._code,), name="idle-imports", daemon=True).start()

    def _import(self, code: ComfyuiCode) -> None:
        started = time.monotonic()
        pauses = _Pauses(self)
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            use_comfyui(code.folder, {**code.options, "cpu": self._device.type == "cpu"})  # quick, and under a lock
            sys.meta_path.insert(0, pauses)
            for name in MODULES:
                importlib.import_module(name)
        except ConfigurationError as error:
            log.info("nothing is imported for LoRAs: %s", error)
        except Exception as error:  # noqa: BLE001 - of other people's modules; the request that needs them says it
            log.info("importing ComfyUI's code for LoRAs ahead failed: %s: %s", type(error).__name__, error)
        else:
            log.info("ComfyUI's code for LoRAs is imported, in %.1f s.", time.monotonic() - started - pauses.seconds)
        finally:
            if pauses in sys.meta_path:
                sys.meta_path.remove(pauses)

    def wait(self) -> None:
        """Return when this rank has had nothing to do for a moment, or another thread waits for an import, which may
        be for this one's."""
        while (self._busy or time.monotonic() - self._rested < QUIET_SECONDS) and not _others_import():
            time.sleep(_LOOK_SECONDS)


class _Pauses(importlib.abc.MetaPathFinder):
    """Finds no module; asked for one by the thread that made this, it waits until the rank is idle."""

    def __init__(self, imports: IdleImports):
        self._imports = imports
        self._thread = threading.get_ident()
        self.seconds = 0.0
        """That were waited."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """See importlib."""
        if threading.get_ident() == self._thread:
            started = time.monotonic()
            self._imports.wait()
            self.seconds += time.monotonic() - started


def _others_import() -> bool:
    """Whether another thread is inside of the import of a module, or waits for one that is being imported."""
    own = threading.get_ident()
    frames = sys._current_frames()
    return any(frame.f_code.co_filename == _IMPORTING for thread, frame in frames.items() if thread != own)
