"""The pool's weights, told to ComfyUI's memory management: a patcher for each GPU, as it asks the models on a GPU for
memory there, and the MODEL itself is on one in its eyes. A MODEL is kept as long as the pool has its weights: ComfyUI
drops it with the node that made it, and could not ask for their memory then, nor have *Unload Models* free it."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

import comfy.model_management
import comfy.model_patcher
import torch
from torch import nn

from parallel_runtime.errors import ParallelError

if TYPE_CHECKING:
    from .remote_transformer import RemoteTransformer

log = logging.getLogger("parallel_dit")

ANYTHING_BUT_ALL = 1 << 50
"""Bytes. ComfyUI asks a model for less when it is short of memory, for 1e30 when it unloads everything; it does not say
which, and calls `partially_unload` where it asks for less than `loaded_size`, `detach` where not."""
_KEPT: list[PatcherOfTransformer] = []  # of MODELs; clones of no other


class PoolShare(nn.Module):
    """What the pool holds of a transformer or a VAE on a GPU, without weights; ComfyUI's console has this name."""

    def __init__(self, remote: Any):
        super().__init__()
        self.parallel_remote = remote


class PatcherOfPool(comfy.model_patcher.ModelPatcher):
    """A patcher whose weights the pool has: they cost what the pool still needs on the patcher's GPU."""

    @property
    def remote(self) -> Any:
        """The transformer or VAE in the pool, shared by all clones."""
        return self.model.parallel_remote

    def model_size(self) -> int:
        """Bytes that have to be free on that GPU before it is loaded."""
        remote = self.remote
        return remote.size_bytes if remote.shares(self.load_device) and not remote.resident_bytes else 0

    def get_free_memory(self, device) -> int:
        """Asked before every call, to cut the batch: it never must, and asking a busy driver costs milliseconds."""
        return sys.maxsize


class PatcherOfTransformer(PatcherOfPool):
    """Short of memory, ComfyUI has the weights parked on the host; it has them dropped when it unloads everything."""

    def loaded_size(self) -> int:
        """More than ComfyUI can miss: so it asks its own models first, and `detach` is for unloading everything."""
        return ANYTHING_BUT_ALL

    def current_loaded_device(self) -> torch.device:
        """Where ComfyUI's own copy is."""
        return torch.device("meta")

    def partially_unload(self, device_to, memory_to_free=0, force_patch_weights=False) -> int:
        """Give memory back under pressure, on all GPUs of the pool; none where it is on other GPUs. Returns what was
        asked for: ComfyUI would detach a model that frees less, and reads what is free for itself."""
        if self.remote.shares(self.load_device) and self.remote.resident_bytes:
            give_back(self.remote, park=True)
        return memory_to_free


class OnAnotherGpu(PatcherOfTransformer):
    """To ComfyUI's memory management a model's weights cost as much there as on ComfyUI's own GPU."""

    def partially_load(self, device_to, extra_memory=0, force_patch_weights=False) -> int:
        """Called before each run: the ranks load."""
        return 0


def other_gpus(remote: RemoteTransformer, own: torch.device) -> list[torch.device]:
    """GPUs that the pool may compute on, besides ComfyUI's own."""
    known = getattr(comfy.model_management, "get_all_torch_devices", None)  # not before it had nodes for several GPUs
    if known is None or own.type != "cuda":
        return []
    current = torch.cuda.current_device() if own.index is None else own.index
    return [device for device in known() if device.index != current and remote.shares(device)]


def give_back(remote: Any, park: bool) -> None:
    """Free what the pool holds of a model or a VAE, or park it on the host, as ComfyUI wishes. Not only what is on the
    devices: runs leave memory behind, too, and parked weights lie on the host."""
    try:
        remote.release(park, comfy.model_management.processing_interrupted)
    except ParallelError as error:  # nothing above catches a cancel either, where ComfyUI unloads between prompts
        log.info("Parallel DiT: nothing to unload. %s", error)


def keep(model: Any) -> None:
    """Keep a MODEL, or that of which it is a clone, when it is loaded or about to be used. Drops none: ComfyUI may be
    in the middle of loading models, and looks at all of them when that is done."""
    first = model
    while first.parent is not None:
        first = first.parent
    if not any(first is kept for kept in _KEPT):
        _KEPT.append(first)


def drop_others(model: Any) -> None:
    """Drop those but this one whose weights have gone from the host, too, or are another's by now. Only while a loader
    runs: ComfyUI drops its own between nodes, too."""
    _KEPT[:] = [kept for kept in _KEPT if kept is model or kept.remote.kept]
