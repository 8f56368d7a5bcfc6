"""A VAE with its weights as a rank holds it: loaded by ComfyUI's own code, let go, loaded again."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..errors import NotLoadedError, UnsupportedModelError
from ..loading.files import Identity, identity
from ..loading.host_file import comfyuis_reason
from ..loading.patchable_network import PatchableNetwork
from ..loading.reading import OnBytes
from ..networks.comfyui.comfy_code import use_comfyui
from ..requests.requests import VaeFile
from ..said import said
from ..streaming.block_stream import BlockStream
from ..streaming.shared_blocks import SharedBlocks


class HeldVae(PatchableNetwork):
    """A VAE's weights; see `HeldWeights` for the methods.

    Args:
        stamp: of the file that they are to be read from.
    """

    keeps_addresses = False
    stream: BlockStream | None = None
    shared: SharedBlocks | None = None

    def __init__(self, file: VaeFile, stamp: Identity, device: torch.device):
        super().__init__(device)
        self.size = file.size
        self.here = False
        self._file = file
        self._stamp = stamp
        self._vae: Any = None

    @property
    def network(self) -> nn.Module:
        """The VAE, on the device."""
        network: nn.Module = self._vae.first_stage_model
        return network

    @property
    def unit(self) -> int:
        """Rows of a picture that a row of the latent is made of."""
        ratio = self._vae.downscale_ratio
        unit = ratio[-1] if isinstance(ratio, tuple) else ratio
        return unit if isinstance(unit, int) else 1

    def attach(self, module: nn.Module) -> None:
        """Nothing: the VAE comes with its weights."""

    def settle(self, patches: object) -> None:
        """Nothing: a VAE has no patches."""

    def fill(self, on_bytes: OnBytes) -> None:
        """Have ComfyUI load the VAE; see `HeldWeights.fill`."""
        if self.here:
            return
        path = self._file.path
        if identity(path) != self._stamp:
            raise NotLoadedError(said("{path} was replaced since it was loaded.", path=path), "Queue the prompt again.")
        on_bytes(0, self.size)
        vae = load_vae(self._file, self.device)
        on_bytes(self.size, self.size)
        vae.first_stage_model.to(self.device).requires_grad_(False)
        self._vae, self.here = vae, True

    def give_back(self) -> None:
        """See `HeldWeights.give_back`."""
        self._vae, self.here = None, False
        gc.collect()


def load_vae(file: VaeFile, device: torch.device) -> Any:
    """ComfyUI's VAE object, its weights on the CPU.

    Raises:
        ConfigurationError: this rank has no ComfyUI.
        UnsupportedModelError: ComfyUI cannot read it, with its reason.
    """
    use_comfyui(file.comfyui.folder, {**file.comfyui.options, "cpu": device.type == "cpu"})
    import comfy.sd
    import comfy.utils

    with comfyuis_reason(said("ComfyUI cannot load the VAE of {path}", path=file.path)), _choosing(file.dtype):
        if file.checkpoint:
            options = {"load_device": device}
            vae = comfy.sd.load_checkpoint_guess_config(
                file.path, output_clip=False, output_model=False, model_options=options
            )[2]
        else:
            weights, metadata = comfy.utils.load_torch_file(file.path, return_metadata=True)
            if file.metadata is not None:
                metadata = {**(metadata or {}), **file.metadata}
            vae = comfy.sd.VAE(sd=weights, device=device, metadata=metadata)
    if vae is None or vae.first_stage_model is None:
        raise UnsupportedModelError(said("ComfyUI finds no VAE in {path}.", path=file.path), "Choose another file.")
    return vae


@contextlib.contextmanager
def _choosing(dtype: str) -> Iterator[None]:
    """Inside, ComfyUI takes this type for a VAE: the one that it took in its own process."""
    import comfy.model_management as management

    own = management.vae_dtype
    management.vae_dtype = lambda *args, **kwargs: getattr(torch, dtype)
    try:
        yield
    finally:
        management.vae_dtype = own
