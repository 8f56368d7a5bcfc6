"""The denoising loop of one `Sample` request by ComfyUI's own code for its sampler, run alike on every rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..errors import RequestError
from ..networks.comfyui.comfy_code import use_comfyui
from ..networks.comfyui.live_patches import make_guidance
from ..networks.comfyui.node_rules import CFG
from ..requests.comfyui_code import HostLoop, sampling_name
from ..requests.requests import Sample
from ..sampling.denoiser import check_guidance
from .denoise import Loop
from .evaluation import Evaluation, Told
from .guider import GuidedModel, load_guider, make_sampling, sampler_function

_ADAPTIVE = "dpm_adaptive"


class HostDenoising(Loop):
    """A loop of ComfyUI's samplers. Arguments as of `Loop`.

    Raises:
        RequestError: a sampler, guider or function that this ComfyUI does not have, or that no rank may run.
        ConfigurationError: there is no ComfyUI on this rank's host.
    """

    def __init__(self, request: Sample, host: HostLoop, dtype: torch.dtype, device: torch.device, unlike: bool):
        super().__init__(request, dtype, unlike)
        self._host = host
        if unlike and request.sampler == _ADAPTIVE:  # ranks would take steps of other lengths
            raise RequestError(
                "Sampler {name} chooses its steps by what it sees, which GPUs of several models see otherwise.",
                "Choose another sampler, or GPUs of one model.",
                name=repr(_ADAPTIVE),
            )
        use_comfyui(host.comfyui.folder, {**host.comfyui.options, "cpu": device.type == "cpu"})
        self._function = sampler_function(request.sampler)
        self._guider = load_guider(host.guider, [branch.index for branch in request.branches])
        if host.guider.code == CFG:
            check_guidance(len(request.branches), request.cfg)
        make_guidance(host.guidance, None)

    def check(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        """Also refuse noise that ComfyUI would draw on another kind of device: samplers draw it where the latent is."""
        super().check(tensors, device)
        if device.type != self._host.noise_device:
            raise RequestError(
                "The noise of this sampler is drawn on {noise_device}, and this worker is on {device}.",
                "Run the workers on the kind of device that ComfyUI uses.",
                noise_device=self._host.noise_device,
                device=device,
            )
        self._make_sampling(tensors)

    def _steps(self, evaluate: Evaluation, tensors: Mapping[str, torch.Tensor], on_step: Told) -> torch.Tensor:
        sampling = self._make_sampling(tensors)
        model = GuidedModel(self._guider, evaluate, sampling, self.inpaint(tensors), tensors["sigmas"])
        guidance = make_guidance(self._host.guidance, sampling)
        return model.sample(self._function, self._host, tensors["x"], guidance, on_step)

    def _make_sampling(self, tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
        held = {name: tensors[sampling_name(name)] for name in self._host.tensors}
        return make_sampling(self._host.bases, self._host.values, held)
