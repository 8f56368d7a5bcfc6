"""A VAE object like ComfyUI's, whose encoder and decoder run in the pool.

ComfyUI's own object decides what goes in and comes out (sizes, channels, batches, numbers from 0 to 1); its network
alone is replaced, by the call to the pool. Tiles are there to save memory, which shared rows do, too: the nodes with
tiles run whole.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import comfy.model_management
import comfy.model_patcher
import comfy.sd
import torch
from torch import nn

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import OutOfMemoryError, ParallelError, RequestError
from parallel_runtime.requests.control import Cancelled
from parallel_runtime.requests.requests import Scalar, VaeFile
from parallel_runtime.said import Said, said

from .comfyui_code import comfyui_code
from .interrupt import stopping_with_prompt
from .remote_transformer import may_compute_on
from .run_notices import RunNotices

if TYPE_CHECKING:
    from workers.client.client import PoolClient, VaeRequest

log = logging.getLogger("parallel_dit")

_LOADERS = {"load_vae_patcher": False, "load_checkpoint_vae_patcher": True}
"""What ComfyUI notes as the way to load a VAE again -> whether its file is a checkpoint."""


def find_file(vae: Any) -> VaeFile:
    """The file that a VAE object was loaded from, as ComfyUI's loaders note it.

    Raises:
        RequestError: there is none, or the VAE is not as in its file.
    """
    patcher: Any = getattr(vae, "patcher", None)
    noted: Any = getattr(patcher, "cached_patcher_init", None)
    name = getattr(noted[0], "__name__", "") if noted else ""
    if isinstance(vae, ParallelVae) or name not in _LOADERS:
        raise RequestError(
            "The VAE was not loaded from a file by Load VAE or by a checkpoint loader of this ComfyUI.",
            "Connect one of these nodes; an older ComfyUI does not note the file: decode without Parallel VAE there.",
        )
    if patcher.patches or patcher.object_patches:
        raise RequestError(
            "A node has changed the VAE, which the workers load from its file.",
            "Connect the loader itself to Parallel VAE.",
        )
    path, given = noted[1][0], noted[1][1]
    metadata = None
    if not _LOADERS[name] and given:
        metadata = {key: value for key, value in given.items() if isinstance(value, Scalar)}
    dtype = str(vae.vae_dtype).removeprefix("torch.")
    return VaeFile(str(path), _LOADERS[name], dtype, vae.model_size(), comfyui_code(None), metadata)


class RemoteVae:
    """A VAE in a pool. It is in the place of ComfyUI's network; what else nodes look at there is the network's own.

    Args:
        source: ComfyUI's object, which knows what it takes of memory.
        config: whose devices run it.
        connect: configuration -> pool.
        ranks: that share a picture.
    """

    comfy_has_chunked_io = False

    def __init__(
        self,
        source: Any,
        config: ParallelConfig,
        connect: Callable[[ParallelConfig], PoolClient],
        ranks: int,
        notices: RunNotices,
    ):
        from workers.client.client import VaeRequest

        self.request: VaeRequest = VaeRequest(find_file(source), ranks)
        self.source = source
        self._config = config
        self._connect = connect
        self._notices = notices
        self._pool: PoolClient | None = None

    @property
    def resident_bytes(self) -> int:
        """Bytes that one rank holds of it now."""
        return self._pool.held_bytes(self.request) if self._pool is not None else 0

    def shares(self, device: torch.device) -> bool:
        """Whether a rank may compute on this device of ComfyUI's, and so compete for its memory."""
        return may_compute_on(self._config, device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source.first_stage_model, name)

    def decode(self, z: torch.Tensor, **options: Any) -> torch.Tensor:
        """In the pool."""
        source = self.source
        pixels = math.prod(_scaled(z.shape, source.upscale_ratio, source.latent_dim)) * source.output_channels
        memory = source.memory_used_decode(z.shape, z.dtype)
        return self.run("decoder", z, memory, z.shape[0] * pixels * z.dtype.itemsize, options)

    def encode(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        """In the pool; the answer is smaller than what was asked."""
        return self.run("encoder", x, self.source.memory_used_encode(x.shape, x.dtype), 0, options)

    def run(self, half: str, x: torch.Tensor, memory: float, answer: int, options: dict[str, Any]) -> torch.Tensor:
        """Encode or decode.

        Args:
            memory: bytes that ComfyUI estimates for it; answer: bytes of the result.
            options: further arguments of ComfyUI's method.

        Raises:
            RequestError: the tensor holds NaN, or an option does not travel.
            torch.OutOfMemoryError: for it there is too little memory; ComfyUI tries it in tiles then.
            ParallelError: see PoolClient.run_vae.
            InterruptProcessingException: the artist stopped the prompt.
        """
        if foreign := [name for name, value in options.items() if not isinstance(value, Scalar)]:
            raise RequestError(
                said("The VAE is given {what}, which cannot be sent to the workers.", what=", ".join(foreign)),
                "Decode without Parallel VAE.",
            )
        with stopping_with_prompt() as interrupted:
            pool = self._pool = self._connect(self._config)
            try:
                output = pool.run_vae(
                    self.request,
                    half,
                    x.cpu(),
                    memory=int(memory),
                    answer_bytes=answer,
                    seed=torch.initial_seed() & (2**63 - 1),
                    options=options,
                    should_cancel=self._notices.waits.watching(pool, interrupted, "load"),
                )
            except OutOfMemoryError as error:
                raise torch.OutOfMemoryError(str(error)) from error  # by its type ComfyUI knows that tiles may help
            self._notices.waits.end()
            if pool.ran is not None and pool.ran.plan:
                self._notices.waits.tell(pool.ran.plan)
        return output

    def release(self) -> None:
        """Free its weights in the pool."""
        if self._pool is not None and self.resident_bytes:
            try:
                self._pool.release(self.request, should_cancel=comfy.model_management.processing_interrupted)
            except (ParallelError, Cancelled) as error:
                log.info("Parallel DiT: the VAE stays. %s", error)


def _scaled(shape: torch.Size, ratio: Any, dims: int) -> list[int]:
    """Sizes of what a latent is decoded to, without batch and channels."""
    sizes = list(shape[-dims:])
    ratios = ratio if isinstance(ratio, tuple) else (ratio,) * len(sizes)
    scaled = zip(ratios, sizes, strict=False)
    return [math.ceil(each(size) if callable(each) else each * size) for each, size in scaled]


class PoolVae(nn.Module):
    """What ComfyUI's memory management sees of it: no weights. Its console has this name."""

    def __init__(self, remote: RemoteVae):
        super().__init__()
        self.remote = remote


class RemoteVaePatcher(comfy.model_patcher.ModelPatcher):
    """To ComfyUI's memory management the VAE costs what the pool still needs on ComfyUI's own GPU."""

    @classmethod
    def make(cls, remote: RemoteVae) -> RemoteVaePatcher:
        """A patcher of no weights here."""
        source = remote.source.patcher
        return cls(PoolVae(remote), load_device=source.load_device, offload_device=source.offload_device)

    @property
    def remote(self) -> RemoteVae:
        """The VAE in the pool, shared by all clones."""
        return self.model.remote

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

    def model_size(self) -> int:
        """Bytes that have to be free on ComfyUI's GPU before it is loaded."""
        remote = self.remote
        return remote.request.file.size if remote.shares(self.load_device) and not remote.resident_bytes else 0

    def loaded_size(self) -> int:
        """Bytes that it has there."""
        return self.remote.resident_bytes if self.remote.shares(self.load_device) else 0

    def get_free_memory(self, device) -> int:
        """Batches go to the pool whole."""
        return sys.maxsize

    def partially_unload(self, device_to, memory_to_free=0, force_patch_weights=False) -> int:
        """All of it or nothing."""
        freed = self.loaded_size()
        if freed:
            self.remote.release()
        return freed

    def detach(self, unpatch_all=True):
        """ComfyUI unloads it."""
        if unpatch_all:
            self.remote.release()
        return super().detach(unpatch_all)


class ParallelVae(comfy.sd.VAE):
    """ComfyUI's VAE with its network in the pool."""

    def __init__(self, remote: RemoteVae):
        source = remote.source
        self.__dict__.update(vars(source))
        self.remote = remote
        self.disable_offload = False
        self.patcher = RemoteVaePatcher.make(remote)
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


def describe(remote: RemoteVae) -> Said:
    """Who runs it, a sentence or two."""
    from parallel_runtime.vae.families import find_half

    network, ranks = remote.source.first_stage_model, remote.request.ranks
    if ranks > 1 and not (find_half(network, "decoder") or find_half(network, "encoder")):
        return said(
            "{name} runs on one of the devices: its pictures cannot be shared out.", name=type(network).__name__
        )
    if ranks > 1:
        return said("Encodes and decodes on {count} devices, each with its rows of the picture.", count=ranks)
    return said("Encodes and decodes on one device.")
