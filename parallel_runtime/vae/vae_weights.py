"""A VAE as a rank has it: made by ComfyUI's own code, its weights held as those of any network."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..acceleration.recordings import RecordedForward
from ..errors import UnsupportedModelError
from ..loading.comfyui_network import find_in
from ..loading.files import Identity
from ..loading.host_file import comfyuis_reason
from ..loading.loaded_weights import LoadedWeights
from ..loading.reading import Find, OnBytes, Reader
from ..mesh.mesh import Mesh
from ..networks.comfyui.comfy_code import use_comfyui
from ..replaced import replaced
from ..requests.requests import VaeFile
from ..said import said
from .shared_vae import Run

if TYPE_CHECKING:
    from .compiled_decoder import CompiledDecoder


class VaeReader(Reader):
    """Has ComfyUI load a VAE of a file with this stamp; see `Reader`. `unit`, once it was opened, is how many rows of a
    picture a row of the latent is made of."""

    def __init__(self, file: VaeFile, stamp: Identity, device: torch.device):
        super().__init__(file.path, stamp)
        self.unit, self._file, self._device = 1, file, device

    def begin(self, on_bytes: OnBytes) -> tuple[nn.Module, Find]:
        on_bytes(0, self._file.size)
        vae = load_vae(self._file, self._device)
        ratio = vae.downscale_ratio
        unit = ratio[-1] if isinstance(ratio, tuple) else ratio
        self.unit = unit if isinstance(unit, int) else 1
        network: nn.Module = vae.first_stage_model.requires_grad_(False)
        return network, find_in(network, None)


class RecordedPart(RecordedForward):
    """A rank's part of a picture as a CUDA graph: several ranks compute it faster than Python launches its kernels.
    Records, as `RecordedForward`, what is given with each call, and computes the same from the same rows."""

    def __init__(self) -> None:
        super().__init__(lambda own, **kind: self._run(own))
        self._run: Run

    def record_or_run(self, mesh: Mesh, run: Run, own: torch.Tensor, **kind: int | str) -> torch.Tensor:
        """Run it, or its recording; `kind`: on what else `run` depends, on any rank. Collective over the sequence."""
        with replaced(self, "_run", run):  # and not for longer: it holds the request
            made: torch.Tensor = self(mesh, (own,), kind)
        return made


class VaeWeights(LoadedWeights):
    """A VAE's weights; for the arguments `VaeReader`."""

    def __init__(self, file: VaeFile, stamp: Identity, device: torch.device):
        self.reader = VaeReader(file, stamp, device)
        self.recorded = RecordedPart()
        # Kinds of runs since the weights are here, for which memory was there, and whether they may be recorded.
        self.tried: dict[str, bool] = {}
        super().__init__(self.reader, device)

    @functools.cached_property
    def compiled(self) -> CompiledDecoder:
        """Made when it is needed: few VAEs need it, and it imports PyTorch's compiler."""
        from .compiled_decoder import CompiledDecoder

        return CompiledDecoder()

    def give_back(self) -> None:
        """Return their memory and that of recordings; whether there is enough for a run is to be tried anew."""
        self.tried.clear()
        self.recorded.lose()
        super().give_back()

    def forget_runs(self) -> None:
        """Let go of what runs have left behind. Every rank of the pool calls it."""
        self.recorded.clear()


def load_vae(file: VaeFile, device: torch.device) -> Any:
    """ComfyUI's VAE object, its weights on the CPU. UnsupportedModelError where ComfyUI cannot read it, with its
    reason; ConfigurationError where this rank has no ComfyUI."""
    use_comfyui(file.comfyui.folder, {**file.comfyui.options, "cpu": device.type == "cpu"})
    import comfy.model_management
    import comfy.sd
    import comfy.utils

    # ComfyUI takes the type for it that it took in its own process.
    chosen = replaced(comfy.model_management, "vae_dtype", lambda *args, **kwargs: getattr(torch, file.dtype))
    with comfyuis_reason(said("ComfyUI cannot load the VAE of {path}", path=file.path)), chosen:
        if file.checkpoint:
            options = {"output_clip": False, "output_model": False, "model_options": {"load_device": device}}
            vae = comfy.sd.load_checkpoint_guess_config(file.path, **options)[2]
        else:
            weights, metadata = comfy.utils.load_torch_file(file.path, return_metadata=True)
            if file.metadata is not None:
                metadata = {**(metadata or {}), **file.metadata}
            vae = comfy.sd.VAE(sd=weights, device=device, metadata=metadata)
    if vae is None or vae.first_stage_model is None:
        raise UnsupportedModelError("ComfyUI finds no VAE in {path}.", "Choose another file.", path=file.path)
    return vae
