"""The pool's weights on GPUs besides ComfyUI's own, told to its memory management, one patcher for each.

ComfyUI asks the models on a GPU for memory there, such as for a text encoder behind *Select CLIP Device*: the MODEL
itself is on one GPU in its eyes.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

import comfy.model_management
import comfy.model_patcher
import torch
from torch import nn

from parallel_runtime.errors import ParallelError
from parallel_runtime.requests.control import Cancelled

if TYPE_CHECKING:
    from .remote_transformer import RemoteTransformer

log = logging.getLogger("parallel_dit")

META = torch.device("meta")
ANYTHING_BUT_ALL = 1 << 50
"""Bytes. ComfyUI asks a model for less when it is short of memory, for 1e30 when it unloads everything; it does not say
which, and calls `partially_unload` where it asks for less than `loaded_size`, `detach` where not."""


class PoolShare(nn.Module):
    """What the pool holds on one more GPU; ComfyUI's console has this name."""


class PatcherOfPool(comfy.model_patcher.ModelPatcher):
    """A patcher whose weights the pool has."""

    def loaded_size(self) -> int:
        """More than ComfyUI can miss: so it asks its own models first, and `detach` is for unloading everything."""
        return ANYTHING_BUT_ALL

    def get_free_memory(self, device) -> int:
        """What ComfyUI asks before every call, to see whether it must cut the batch: it never must, and asking the
        driver costs milliseconds while other processes compute on the same GPU."""
        return sys.maxsize

    def current_loaded_device(self) -> torch.device:
        """Where ComfyUI's own copy is."""
        return META


class OnAnotherGpu(PatcherOfPool):
    """To ComfyUI's memory management a model's weights cost as much there as on ComfyUI's own GPU."""

    remote: RemoteTransformer

    @classmethod
    def make(cls, remote: RemoteTransformer, device: torch.device) -> OnAnotherGpu:
        """A patcher of no weights here."""
        patcher = cls(PoolShare(), load_device=device, offload_device=torch.device("cpu"))
        patcher.remote = remote
        return patcher

    def model_size(self) -> int:
        """Bytes that the pool still needs on that GPU."""
        return 0 if self.remote.resident_bytes else self.remote.size_bytes

    def partially_load(self, device_to, extra_memory=0, force_patch_weights=False) -> int:
        """Called before each run: the ranks load."""
        return 0

    def partially_unload(self, device_to, memory_to_free=0, force_patch_weights=False) -> int:
        """Give memory back under pressure, on all GPUs of the pool; returns what was asked for, as the MODEL's own."""
        if self.remote.resident_bytes:
            give_back(self.remote, park=True)
        return memory_to_free


def other_gpus(remote: RemoteTransformer, own: torch.device) -> list[torch.device]:
    """GPUs that the pool may compute on, besides ComfyUI's own."""
    known = getattr(comfy.model_management, "get_all_torch_devices", None)  # not before it had nodes for several GPUs
    if known is None or own.type != "cuda":
        return []
    current = torch.cuda.current_device() if own.index is None else own.index
    return [device for device in known() if device.index != current and remote.shares(device)]


def give_back(remote: RemoteTransformer, park: bool) -> None:
    """Free what the pool holds of a model, or park it on the host, as ComfyUI wishes.

    Not only what is on the devices: runs leave memory behind, too, and parked weights lie on the host.
    """
    try:
        remote.release(park, comfy.model_management.processing_interrupted)
    except ParallelError as error:
        log.info("Parallel DiT: nothing to unload. %s", error)
    except Cancelled:  # nothing above catches it where ComfyUI unloads between prompts
        log.info("Parallel DiT: interrupted before the pool was free, so %s stays.", remote.model.path)
