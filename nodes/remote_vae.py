"""A VAE object like ComfyUI's, whose network alone is replaced, by calls to the pool. Tiles are there to save memory,
which shared rows do, too: the nodes with tiles run whole."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import comfy.sd
import torch

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import OutOfMemoryError, RequestError
from parallel_runtime.requests.comfyui_code import Scalar
from parallel_runtime.requests.requests import VaeFile
from parallel_runtime.said import Said, said
from parallel_runtime.vae.families import find_half, find_tiles

from .comfyui_code import comfyui_code
from .interrupt import stopping_with_prompt
from .next_prompt import NEXT
from .pool_patchers import PatcherOfPool, PoolShare, give_back
from .remote_transformer import may_compute_on
from .run_notices import RunNotices

if TYPE_CHECKING:
    from workers.client.client import PoolClient
    from workers.client.node_requests import VaeRequest

_LOADERS = {"load_vae_patcher": False, "load_checkpoint_vae_patcher": True}  # noted way to load -> is a checkpoint


def find_file(vae: Any) -> VaeFile:
    """The file that ComfyUI's loaders note for a VAE; RequestError where they did not, or it was changed since."""
    patcher: Any = getattr(vae, "patcher", None)
    noted: Any = getattr(patcher, "cached_patcher_init", None)
    name = getattr(noted[0], "__name__", "") if noted else ""
    if isinstance(getattr(vae, "first_stage_model", None), RemoteVae) or name not in _LOADERS:
        text = "The VAE was not loaded from a file by Load VAE or by a checkpoint loader of this ComfyUI."
        fix = "Connect one of these nodes; an older ComfyUI does not note the file: decode without Parallel VAE there."
        raise RequestError(text, fix)
    if patcher.patches or patcher.object_patches:
        text = "A node has changed the VAE, which the workers load from its file."
        raise RequestError(text, "Connect the loader itself to Parallel VAE.")
    path, given = noted[1][0], noted[1][1]
    metadata = None
    if not _LOADERS[name] and given:
        metadata = {key: value for key, value in given.items() if isinstance(value, Scalar)}
    dtype = str(vae.vae_dtype).removeprefix("torch.")
    return VaeFile(str(path), _LOADERS[name], dtype, vae.model_size(), comfyui_code(None), metadata)


class RemoteVae:
    """A VAE in the pool, of which `ranks` share a picture, in the place of the network of ComfyUI's object `source`;
    what else nodes look at there is the network's own."""

    def __init__(
        self, source: Any, config: ParallelConfig, connect: Callable[[ParallelConfig], PoolClient], ranks: int,
        notices: RunNotices,
    ):  # fmt: skip
        from workers.client.node_requests import VaeRequest

        self.request: VaeRequest = VaeRequest(find_file(source), ranks)
        self.size_bytes = self.request.file.size  # when it is loaded
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
        return may_compute_on(self._config, device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source.first_stage_model, name)

    @property
    def comfy_has_chunked_io(self) -> bool:
        """ComfyUI 0.33 then has memory ready for a picture whose size it knows: three passes over a video fewer."""
        source = self.source
        says_all = getattr(source, "conv_out_channels", source.output_channels) == source.output_channels
        network = source.first_stage_model
        return says_all and bool(find_half(network, "decoder") or find_tiles(network, "decoder"))

    def decode_output_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Of the picture, by the network or ComfyUI's numbers."""
        if getattr(self.source.first_stage_model, "comfy_has_chunked_io", False):
            return tuple(self.source.first_stage_model.decode_output_shape(shape))
        source, sizes = self.source, shape[-self.source.latent_dim :]
        ratio = source.upscale_ratio
        scaled = zip(ratio if isinstance(ratio, tuple) else (ratio,) * len(sizes), sizes, strict=False)
        sides = (math.ceil(each(size) if callable(each) else each * size) for each, size in scaled)
        return (shape[0], source.output_channels, *sides)

    def decode(self, z: torch.Tensor, output_buffer: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        memory = self.source.memory_used_decode(z.shape, z.dtype)
        made = torch.float32 if find_tiles(self.source.first_stage_model, "decoder") else z.dtype
        answer = math.prod(self.decode_output_shape(z.shape)) * made.itemsize
        return self._run("decoder", z, memory, answer, options, output_buffer)

    def encode(self, x: torch.Tensor, device: Any = None, **options: Any) -> torch.Tensor:
        """In the pool; the answer is smaller than what was asked."""
        return self._run("encoder", x, self.source.memory_used_encode(x.shape, x.dtype), 0, options, None)

    def _run(
        self, half: str, x: torch.Tensor, memory: float, answer: int, options: dict[str, Any], into: torch.Tensor | None
    ) -> torch.Tensor:
        """Encode or decode, in some `memory` bytes; the result has `answer`, and gets memory of its own without `into`.
        RequestError for NaN or an option that does not travel, ParallelError as PoolClient.run_vae."""
        if foreign := [name for name, value in options.items() if not isinstance(value, Scalar)]:
            what = "The VAE is given {what}, which cannot be sent to the workers."
            raise RequestError(what, "Decode without Parallel VAE.", what=", ".join(foreign))
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
                    into=into,
                    should_cancel=self._notices.watching(pool, interrupted, "load"),
                )
            except OutOfMemoryError as error:
                raise torch.OutOfMemoryError(str(error)) from error  # by its type ComfyUI knows that tiles may help
            self._notices.end()
            if pool.ran is not None and pool.ran.plan:
                self._notices.tell(pool.ran.plan)
        NEXT.used()
        return output

    def release(self, park: bool, should_cancel: Callable[[], bool]) -> int:
        """Free its weights in the pool, or park them; returns the bytes freed per rank."""
        return self._pool.release(self.request, park, should_cancel) if self._pool and self.resident_bytes else 0


class PoolVae(PoolShare):
    """ComfyUI's console has this name."""


class RemoteVaePatcher(PatcherOfPool):
    """To ComfyUI's memory management the VAE costs what the pool still needs on ComfyUI's own GPU."""

    def deepclone_multigpu(self, new_load_device=None, models_cache=None):
        """Called by *Select VAE Device*, which tells its log what is raised here, and gives the VAE on as it is."""
        raise RuntimeError("The VAE runs on the devices of Parallel VAE, which its Parallel Config chooses.")

    def add_patches(self, patches, strength_patch=1.0, strength_model=1.0) -> list[Any]:
        """Called by a node that changes weights (SUPIRApply), which would have no effect."""
        text = "The node changes weights of the VAE, which the workers load from its file."
        raise RequestError(text, "Connect the loader itself to this node, not Parallel VAE.")

    def loaded_size(self) -> int:
        return self.remote.resident_bytes if self.remote.shares(self.load_device) else 0

    def partially_unload(self, device_to, memory_to_free=0, force_patch_weights=False) -> int:
        """All of it or nothing."""
        if freed := self.loaded_size():
            give_back(self.remote, park=False)
        return freed

    def detach(self, unpatch_all=True):
        if unpatch_all:
            give_back(self.remote, park=False)
        return super().detach(unpatch_all)


class ParallelVae(comfy.sd.VAE):
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
    device = property(lambda self: torch.device("cpu"), lambda self, device: None)
    first_stage_model = property(lambda self: self.remote, lambda self, network: None)

    def prepare_decode(self, *args: Any, **kwargs: Any):
        """Called by nodes that use more of the network than `decode` (Trellis 2): ComfyUI's own is loaded for them."""
        return self.remote.source.prepare_decode(*args, **kwargs)

    def decode_tiled(self, samples, *args: Any, **kwargs: Any):
        """Without tiles: the rows of the picture are shared out, and nothing of it changes."""
        return self.decode(samples)

    def encode_tiled(self, pixel_samples, *args: Any, **kwargs: Any):
        return self.encode(pixel_samples)

    def get_sd(self):
        """The weights, for nodes that save them."""
        return self.remote.source.get_sd()


def describe(remote: RemoteVae) -> Said:
    """Who runs it, a sentence or two."""
    network, ranks = remote.source.first_stage_model, remote.request.ranks
    if ranks == 1:
        return said("Encodes and decodes on one device.")
    if find_half(network, "decoder") or find_half(network, "encoder"):
        return said("Encodes and decodes on {count} devices, each with its rows of the picture.", count=ranks)
    if find_tiles(network, "decoder"):
        return said("Encodes and decodes on {count} devices, each with some of the picture's tiles.", count=ranks)
    return said("{name} runs on one of the devices: its pictures cannot be shared out.", name=type(network).__name__)
