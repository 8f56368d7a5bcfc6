"""A SAMPLER that hands the whole denoising loop to the pool, or says why it cannot and runs per step."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import comfy.model_base
import comfy.model_sampling
import comfy.samplers
import torch

from parallel_runtime.device_kind import device_kind
from parallel_runtime.errors import OtherNetworkError
from parallel_runtime.networks.comfyui.networks import find_network
from parallel_runtime.said import Said, said
from parallel_runtime.sampling.samplers import SAMPLERS

from .interrupt import stopping_with_prompt
from .transportable import call_obstacles, condition_obstacles, loop_obstacles, split_branches, split_extra_channels

if TYPE_CHECKING:
    from workers.client.client import InpaintInputs, LoopRequest

    from .remote_transformer import RemoteTransformer
    from .transformer_call import TransformerCall

_PREDICTIONS = {
    "flow": comfy.model_sampling.CONST,
    "eps": comfy.model_sampling.EPS,
    "v_prediction": comfy.model_sampling.V_PREDICTION,
}
_RULES = ("calculate_input", "calculate_denoised", "noise_scaling", "inverse_noise_scaling")


def prediction_name(sampling: Any) -> str:
    """Return the pool's name for what a model's output means; empty where the pool does not know it.

    Args:
        sampling: ComfyUI's model sampling; a subclass that changes one of the rules is not known.
    """
    own = type(sampling)
    for name, plain in _PREDICTIONS.items():
        if issubclass(own, plain) and all(getattr(own, rule) is getattr(plain, rule) for rule in _RULES):
            return name
    return ""


def sampling_obstacles(model: Any) -> list[Said]:
    """Name where a model's sampling differs from what the pool's samplers know.

    Args:
        model: ComfyUI's BaseModel.
    """
    sampling = model.model_sampling
    found = [] if prediction_name(sampling) else [said("the model sampling {name}", name=type(sampling).__name__)]
    for setting, text in {"noise_scale": said("a noise scale"), "sigma_data": said("a scale of the data")}.items():
        if getattr(sampling, setting, 1.0) != 1.0:
            found.append(text)
    return found


class PoolSampler(comfy.samplers.Sampler):
    """ComfyUI's KSAMPLER with the loop elsewhere; noise and sigmas are ComfyUI's.

    Args:
        name: a sampler of ComfyUI's list.
        remote: the transformer.
        preview: wish denoised latents along with the progress.

    After `sample`, `obstacles` names why it ran per step; empty when it ran in the pool.
    """

    def __init__(self, name: str, remote: RemoteTransformer, preview: bool):
        self.name = name
        self.remote = remote
        self.preview = preview
        self.obstacles: list[Said] = []
        self._native = comfy.samplers.sampler_object(name)

    def sample(
        self, model_wrap, sigmas, extra_args, callback, noise, latent_image=None, denoise_mask=None, disable_pbar=False
    ) -> torch.Tensor:
        """Called by ComfyUI's guider; arguments and result are those of KSAMPLER.sample."""
        native = (model_wrap, sigmas, extra_args, callback, noise, latent_image, denoise_mask, disable_pbar)
        self.obstacles = self._obstacles(model_wrap, extra_args["model_options"], denoise_mask)
        if self.obstacles or len(sigmas) < 2:
            return self._native.sample(*native)
        sampling = model_wrap.inner_model.model_sampling
        x = sampling.noise_scaling(sigmas[0], noise, latent_image, self.max_denoise(model_wrap, sigmas))
        calls = self._evaluate_dry(model_wrap, x, sigmas[0].expand(x.shape[0]), extra_args)
        # A sigma of 0 is never evaluated, and has no place in some tables.
        timesteps = torch.where(sigmas > 0, sampling.timestep(sigmas).float(), 0.0)
        self.obstacles = call_obstacles(calls, tuple(x.shape), timesteps[0].expand(x.shape[0]), model_wrap.cfg)
        if self.obstacles:
            return self._native.sample(*native)
        request = replace(
            self._request(calls, x, sigmas, model_wrap.cfg, extra_args["seed"]),
            timesteps=timesteps,
            prediction=prediction_name(sampling),
            inpaint=self._inpaint(noise, latent_image, denoise_mask, extra_args["seed"]),
        )
        try:
            latent = self._run(request, callback)
        except OtherNetworkError as error:
            self.remote.turn_to_comfyui(error)
            return self.sample(*native)
        return sampling.inverse_noise_scaling(SAMPLERS[self.name].end_sigma(sigmas), latent)

    def _obstacles(self, model_wrap, model_options, denoise_mask) -> list[Said]:
        """Everything that can be told without an evaluation."""
        model = model_wrap.inner_model
        found = [] if self.name in SAMPLERS else [said("the sampler {name}", name=self.name)]
        found += sampling_obstacles(model) + loop_obstacles(model_options) + condition_obstacles(model_wrap.conds)
        if self._native.extra_options:
            found.append(said("sampler options"))
        if self._rows_together(model) and model_wrap.cfg != 1.0:
            found.append(said("rows of a batch that depend on one another"))
        rule = type(model).scale_latent_inpaint
        if denoise_mask is not None and rule is not comfy.model_base.BaseModel.scale_latent_inpaint:
            found.append(said("the noise mask of {name}", name=type(model).__name__))
        if self._adds_noise and not self._same_noise(model_wrap.model_patcher.load_device):
            found.append(said("noise of a device that the pool does not have"))
        return found

    def _rows_together(self, model) -> bool:
        """Whether ComfyUI's own network runs, and takes the branches as one batch in ComfyUI's order."""
        network = find_network(type(model.diffusion_model)) if self.remote.model.comfyui is not None else None
        return network is not None and network.rows_together

    @property
    def _adds_noise(self) -> bool:
        return self.name in SAMPLERS and SAMPLERS[self.name].adds_noise

    def _same_noise(self, device: torch.device) -> bool:
        """The pool draws ComfyUI's numbers: on a CPU always, on a GPU where the first rank has one of the same kind."""
        config = self.remote.model.config
        if device.type == "cuda":
            first = torch.device("cuda", (config.device_indices or (0,))[0])
            return not config.devices.startswith("cpu") and device_kind(first) == device_kind(device)
        return device.type == "cpu"

    def _evaluate_dry(self, model_wrap, x, sigma, extra_args) -> list[TransformerCall]:
        """Let ComfyUI prepare one step; what it hands to the transformer is what the pool gets."""
        with self.remote.capture(x.shape[1]) as calls:
            model_wrap(x, sigma, model_options=extra_args["model_options"], seed=extra_args["seed"])
        return calls

    def _inpaint(self, noise, latent_image, denoise_mask, seed) -> InpaintInputs | None:
        from workers.client.client import InpaintInputs

        if denoise_mask is None:
            return None
        if self._native.inpaint_options.get("random", False):
            # ddim: ComfyUI puts another noise under the mask than the one it starts from.
            generator = torch.Generator("cpu").manual_seed(seed + 1)
            noise = torch.randn(noise.shape, generator=generator).to(noise)
        return InpaintInputs(denoise_mask.expand_as(noise), latent_image.expand_as(noise), noise)

    def _request(self, calls, x, sigmas, cfg, seed) -> LoopRequest:
        from workers.client.client import Branch, LoopRequest

        return LoopRequest(
            sampler=self.name,
            sigmas=sigmas.float(),
            x=x,
            branches=tuple(Branch(conditioning, index) for index, conditioning in split_branches(calls)),
            cfg=float(cfg),
            seed=seed,
            noise_device=x.device.type if self._adds_noise else "cpu",
            preview=self.preview,
            concat=tuple(split_extra_channels(calls, x.shape[1])),
            joined=len(calls) == 1,
        )

    def _run(self, request: LoopRequest, callback) -> torch.Tensor:
        def on_progress(step: int, total: int, denoised: torch.Tensor | None) -> None:
            if callback is not None:
                latent = request.x if denoised is None else denoised.to(request.x)
                callback(step, latent, latent, total)

        with stopping_with_prompt() as interrupted:
            return self.remote.sample(request, on_progress, interrupted)
