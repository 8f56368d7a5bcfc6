"""A VAE object like ComfyUI's, whose encoder and decoder run in the pool.

ComfyUI's own object decides what goes in and comes out (sizes, channels, batches, numbers from 0 to 1); its network
alone is replaced, by the call to the pool. Tiles are there to save memory, which shared rows do, too: the nodes with
tiles run whole.
"""

from __future__ import annotations

import sys
from typing import Any

import comfy.sd
import torch

from parallel_runtime.errors import RequestError

from .pool_patchers import PatcherOfPool, PoolShare, give_back
from .remote_vae import RemoteVae


class PoolVae(PoolShare):
    """ComfyUI's console has this name."""


class RemoteVaePatcher(PatcherOfPool):
    """To ComfyUI's memory management the VAE costs what the pool still needs on ComfyUI's own GPU."""

    def deepclone_multigpu(self, new_load_device=None, models_cache=None):
        """Called by *Select VAE Device*, which tells its log what is raised here, and gives the VAE on as it is.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("The VAE runs on the devices of Parallel VAE, which its Parallel Config chooses.")

    def add_patches(self, patches, strength_patch=1.0, strength_model=1.0) -> list[Any]:
        """Called by a node that changes weights (SUPIRApply).

        Raises:
            RequestError: always; they would have no effect.
        """
        raise RequestError(
            "The node changes weights of the VAE, which the workers load from its file.",
            "Connect the loader itself to this node, not Parallel VAE.",
        )

    def loaded_size(self) -> int:
        """Bytes that it has there."""
        return self.remote.resident_bytes if self.remote.shares(self.load_device) else 0

    def partially_unload(self, device_to, memory_to_free=0, force_patch_weights=False) -> int:
        """All of it or nothing."""
        freed = self.loaded_size()
        if freed:
            give_back(self.remote, park=False)
        return freed

    def detach(self, unpatch_all=True):
        """ComfyUI unloads it."""
        if unpatch_all:
            give_back(self.remote, park=False)
        return super().detach(unpatch_all)


class ParallelVae(comfy.sd.VAE):
    """ComfyUI's VAE with its network in the pool."""

    def __init__(self, remote: RemoteVae):
        source = remote.source
        self.__dict__.update(vars(source))
        self.remote = remote
        self.disable_offload = False
        devices = {"load_device": source.patcher.load_device, "offload_device": source.patcher.offload_device}
        self.patcher = RemoteVaePatcher(PoolVae(remote), **devices)
        shared = remote.request.ranks if remote.shares(self.patcher.load_device) else sys.maxsize
        self.memory_used_decode = lambda shape, dtype: source.memory_used_decode(shape, dtype) / shared
        self.memory_used_encode = lambda shape, dtype: source.memory_used_encode(shape, dtype) / shared

    # *Select VAE Device* sets both in a copy, and so for a device on which nothing of this VAE is.
    @property
    def device(self) -> torch.device:
        """Where ComfyUI puts what goes to the pool."""
        return torch.device("cpu")

    @device.setter
    def device(self, device: torch.device) -> None: ...

    @property
    def first_stage_model(self) -> RemoteVae:
        """In the pool."""
        return self.remote

    @first_stage_model.setter
    def first_stage_model(self, network: Any) -> None: ...

    def prepare_decode(self, *args: Any, **kwargs: Any):
        """Called by nodes that use more of the network than `decode` (Trellis 2): ComfyUI's own is loaded for them."""
        return self.remote.source.prepare_decode(*args, **kwargs)

    def decode_tiled(self, samples, *args: Any, **kwargs: Any):
        """Without tiles: the rows of the picture are shared out, and nothing of it changes."""
        return self.decode(samples)

    def encode_tiled(self, pixel_samples, *args: Any, **kwargs: Any):
        """Without tiles."""
        return self.encode(pixel_samples)

    def get_sd(self):
        """The weights, for nodes that save them."""
        return self.remote.source.get_sd()
