"""ComfyUI's hook around every sampler: hands the whole denoising loop to the pool, or says why it cannot."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import comfy.model_base
import comfy.model_sampling
import comfy.samplers
import torch
from comfy.cli_args import LatentPreviewMethod, args
from comfy.patcher_extension import WrapperExecutor, WrappersMP
from tqdm.auto import trange

from parallel_runtime.device_kind import device_kind
from parallel_runtime.errors import OtherNetworkError
from parallel_runtime.networks.comfyui.blocks import LATENT_SHAPES, Network
from parallel_runtime.networks.comfyui.networks import find_network
from parallel_runtime.networks.comfyui.seam import IN_LOOP
from parallel_runtime.said import Said, said
from parallel_runtime.sampling.own_timesteps import OwnTimestep, are_plain, find_own_timesteps
from parallel_runtime.sampling.samplers import SAMPLERS

from .carried_guidance import read_guidance
from .host_loop import host_obstacles, make_host_loop
from .interrupt import stopping_with_prompt
from .known_samplers import KnownSampler, guider_obstacles, known_sampler, second_scale
from .transportable import (
    call_obstacles,
    condition_obstacles,
    loop_obstacles,
    split_branches,
    split_extra_channels,
    split_timesteps,
)

if TYPE_CHECKING:
    from parallel_runtime.requests.requests import HostLoop
    from workers.client.client import InpaintInputs, LoopRequest

    from .remote_patcher import RemoteModelPatcher
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


def add_loop(model: RemoteModelPatcher) -> None:
    """Have whatever node samples with a MODEL run its loop in the pool."""
    model.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, "parallel_dit", _run_sampler)


def _run_sampler(executor: WrapperExecutor, guider: Any, *arguments: Any, **named: Any) -> torch.Tensor:
    """Called by ComfyUI's guider in place of the sampler; see WrappersMP.SAMPLER_SAMPLE."""
    inner = executor.wrappers[executor.idx + 1 :]
    if inner:
        # This one was there first, so those of other nodes come after it; but what they do is around a sampler.
        wrappers = [*inner, _run_sampler]
        return WrapperExecutor(executor.original, executor.class_obj, wrappers, 0).execute(guider, *arguments, **named)
    return _run_loop(executor, guider, *arguments, **named)


def _run_loop(
    executor: WrapperExecutor,
    guider: Any,
    sigmas: torch.Tensor,
    extra_args: dict[str, Any],
    callback: Any,
    noise: torch.Tensor,
    latent_image: torch.Tensor,
    denoise_mask: torch.Tensor | None = None,
    disable_pbar: bool = False,
) -> torch.Tensor:
    """Arguments and result are those of KSAMPLER.sample."""
    remote = guider.inner_model.parallel_remote
    loop = PoolLoop(remote, guider, extra_args, callback, noise, latent_image, denoise_mask, disable_pbar)
    latent = loop.run(executor.class_obj, sigmas)
    remote.notices.loop(loop.obstacles)
    if latent is not None:
        return latent
    return executor(guider, sigmas, extra_args, callback, noise, latent_image, denoise_mask, disable_pbar)


@dataclass
class PoolLoop:
    """One loop of a guider; the arguments are those of KSAMPLER.sample.

    After `run`, `obstacles` names why it has to go step by step; empty when it ran in the pool.
    """

    remote: RemoteTransformer
    guider: Any
    extra_args: dict[str, Any]
    callback: Any
    noise: torch.Tensor
    latent_image: torch.Tensor
    denoise_mask: torch.Tensor | None
    disable_pbar: bool

    def __post_init__(self) -> None:
        self.obstacles: list[Said] = []

    def run(self, sampler: Any, sigmas: torch.Tensor) -> torch.Tensor | None:
        """The finished latent; None where ComfyUI's own loop has to run, or there is nothing to do."""
        known = known_sampler(sampler)
        if known is None:
            self.obstacles = [said("the sampler {name}", name=_name_of(sampler))]
            return None
        self.obstacles = self._obstacles(known)
        steps = len(sigmas) - 1
        if self.remote.stages > 1 and 0 < steps < self.remote.model.config.warmup_steps:
            self.obstacles.append(said("fewer steps than PipeFusion warms up for"))
        if self.obstacles or steps < 1:
            return None
        sampling = self.guider.inner_model.model_sampling
        x = sampling.noise_scaling(sigmas[0], self.noise, self.latent_image, sampler.max_denoise(self.guider, sigmas))
        calls = self._evaluate_dry(known, x, sigmas[0].expand(x.shape[0]))
        # A sigma of 0 is never evaluated, and has no place in some tables.
        timesteps = torch.where(sigmas > 0, sampling.timestep(sigmas).float(), 0.0)
        own_timesteps = self._own_timesteps(known, calls, x, sigmas[0])
        self.obstacles = call_obstacles(calls, tuple(x.shape), self.guider.cfg)
        if self.remote.stages > 1 and any(LATENT_SHAPES in call.conditioning for call in calls):
            self.obstacles.append(said("several latents in one"))
        if own_timesteps is None or (own_timesteps and self.remote.stages > 1):
            self.obstacles.append(said("timesteps of the model's own"))
        if own_timesteps is None or self.obstacles:
            return None
        request = replace(
            self._request(known, calls, x, sigmas),
            timesteps=timesteps,
            inpaint=self._inpaint(known),
            own_timesteps=own_timesteps,
        )
        try:
            latent = self._run(request)
        except OtherNetworkError as error:
            self.remote.turn_to_comfyui(error)
            return self.run(sampler, sigmas)
        if request.host is not None:
            return latent
        return sampling.inverse_noise_scaling(SAMPLERS[known.name].end_sigma(sigmas), latent)

    def _by_comfyui(self, known: KnownSampler) -> bool:
        """Whether ComfyUI's own code for the sampler is to run in the ranks, rather than ours."""
        if known.name not in SAMPLERS or known.options or self._guided:
            return True
        return bool(sampling_obstacles(self.guider.inner_model))

    @property
    def _guided(self) -> bool:
        """Whether guidance is more than one scale between two predictions."""
        return bool(read_guidance(self.extra_args["model_options"])) or second_scale(self.guider) is not None

    def _obstacles(self, known: KnownSampler) -> list[Said]:
        """Everything that can be told without an evaluation."""
        found = guider_obstacles(self.guider)
        if found:
            return found
        model = self.guider.inner_model
        by_comfyui = self._by_comfyui(known)
        if by_comfyui and self.remote.stages > 1:
            found += (
                [said("the sampler {name} over stages", name=known.title)]
                if known.name not in SAMPLERS or known.options
                else []
            )
            found += sampling_obstacles(model)
            found += [said("a custom CFG function")] if self._guided else []
        elif by_comfyui:
            found += host_obstacles(known, model.model_sampling)
        found += loop_obstacles(self.extra_args["model_options"])
        found += condition_obstacles(self.guider.conds)
        if not _is_comfyuis(self.callback):
            found.append(said("a node that looks at each step"))
        if self._rows_together() and self.guider.cfg != 1.0:
            found.append(said("rows of a batch that depend on one another"))
        if self.denoise_mask is not None and not (self._noised(model) or self._kept_clean(model)):
            found.append(said("the noise mask of {name}", name=type(model).__name__))
        adds_noise = by_comfyui or SAMPLERS[known.name].adds_noise
        if adds_noise and not self._same_noise(self.guider.model_patcher.load_device):
            found.append(said("noise of a device that the pool does not have"))
        return found

    def _noised(self, model: Any) -> bool:
        """Whether the model sees what a mask keeps with the noise of each step."""
        return type(model).scale_latent_inpaint is comfy.model_base.BaseModel.scale_latent_inpaint

    def _kept_clean(self, model: Any) -> bool:
        """Whether the model sees what a mask keeps as it is, at each step."""
        kept, sigma = self.latent_image, self.noise.new_ones(self.noise.shape[0])
        seen = model.scale_latent_inpaint(
            x=self.noise, sigma=sigma, noise=self.noise, latent_image=kept, denoise_mask=self.denoise_mask
        )
        return seen is kept

    def _rows_together(self) -> bool:
        """Whether ComfyUI's own network runs, and takes the branches as one batch in ComfyUI's order."""
        return self._network is not None and self._network.rows_together

    @property
    def _in_loop(self) -> dict[str, bool]:
        """What a branch's conditioning says where the network does more around a call than ComfyUI's process has
        done."""
        return {IN_LOOP: True} if self._network is not None and self._network.rescales else {}

    @property
    def _network(self) -> Network | None:
        """What is known of the network, where it is ComfyUI's own."""
        kind = type(self.guider.inner_model.diffusion_model)
        return find_network(kind) if self.remote.model.comfyui is not None else None

    def _same_noise(self, device: torch.device) -> bool:
        """The pool draws ComfyUI's numbers: on a CPU always, on a GPU where the first rank has one of the same kind."""
        config = self.remote.model.config
        if device.type == "cuda":
            first = torch.device("cuda", (config.device_indices or (0,))[0])
            return not config.devices.startswith("cpu") and device_kind(first) == device_kind(device)
        return device.type == "cpu"

    def _evaluate_dry(self, known: KnownSampler, x: torch.Tensor, sigma: torch.Tensor) -> list[TransformerCall]:
        """Let ComfyUI prepare one step; what it hands to the transformer is what the pool gets."""
        options = self.extra_args["model_options"]
        if known.name.endswith("cfg_pp"):  # they look at the negative prediction at any scale
            options = {**options, "disable_cfg1_optimization": True}
        with self.remote.capture(x.shape[1]) as calls:
            self.guider(x, sigma, model_options=options, seed=self.extra_args["seed"])
        return calls

    def _own_timesteps(
        self, known: KnownSampler, calls: list[TransformerCall], x: torch.Tensor, sigma: torch.Tensor
    ) -> Mapping[int, Mapping[str, OwnTimestep]] | None:
        """The timesteps that the model makes of a step's; None where they are no shares of it."""
        rows, told = x.shape[0], self.guider.inner_model.model_sampling.timestep
        timestep, found = told(sigma).float().expand(rows), split_timesteps(calls)
        if are_plain(found, timestep):
            return {}
        later = sigma / 2
        others = split_timesteps(self._evaluate_dry(known, x, later.expand(rows)))
        return find_own_timesteps((timestep, found), (told(later).float().expand(rows), others))

    def _inpaint(self, known: KnownSampler) -> InpaintInputs | None:
        from workers.client.client import InpaintInputs

        noise, mask = self.noise, self.denoise_mask
        if mask is None:
            return None
        if known.random_inpaint:
            # ddim: ComfyUI puts another noise under the mask than the one it starts from.
            generator = torch.Generator("cpu").manual_seed(self.extra_args["seed"] + 1)
            noise = torch.randn(noise.shape, generator=generator).to(noise)
        return InpaintInputs(
            mask.expand_as(noise), self.latent_image.expand_as(noise), noise, not self._noised(self.guider.inner_model)
        )

    def _request(
        self, known: KnownSampler, calls: list[TransformerCall], x: torch.Tensor, sigmas: torch.Tensor
    ) -> LoopRequest:
        from workers.client.client import Branch, LoopRequest

        sampling = self.guider.inner_model.model_sampling
        by_comfyui, code = self._by_comfyui(known), self.remote.model.comfyui or self.remote.model.patching
        host: HostLoop | None = None
        second = None
        tensors: Mapping[str, torch.Tensor] = {}
        if by_comfyui:
            assert code is not None
            guidance, second = read_guidance(self.extra_args["model_options"]), second_scale(self.guider)
            host, tensors = make_host_loop(known, sampling, code, guidance, second)
        return LoopRequest(
            host=host,
            sampling=tensors,
            prediction="flow" if by_comfyui else prediction_name(sampling),
            sampler=known.name,
            sigmas=sigmas.float(),
            x=x,
            branches=tuple(
                Branch(conditioning | self._in_loop, index) for index, conditioning in split_branches(calls)
            ),
            cfg=float(self.guider.cfg if second is None else self.guider.video_cfg),
            seed=self.extra_args["seed"],
            noise_device=x.device.type if by_comfyui or SAMPLERS[known.name].adds_noise else "cpu",
            # Nodes with an output for the denoised latent get it from the last step's preview.
            preview=self._previews or (self._each_may_be_last(known) and _keeps_denoised(self.callback)),
            concat=tuple(split_extra_channels(calls, x.shape[1])),
            joined=len(calls) == 1,
        )

    def _each_may_be_last(self, known: KnownSampler) -> bool:
        """Whether a step's preview cannot be left out because a later one comes for certain."""
        return self.remote.stages > 1 or known.name == "dpm_adaptive"

    @property
    def _previews(self) -> bool:
        """Whether ComfyUI shows previews now; each prompt may set it anew."""
        return args.preview_method is not LatentPreviewMethod.NoPreviews

    def _run(self, request: LoopRequest) -> torch.Tensor:
        with trange(len(request.sigmas) - 1, disable=self.disable_pbar) as bar:

            def on_progress(step: int, total: int, denoised: torch.Tensor | None) -> None:
                bar.update()
                if self.callback is not None:
                    latent = request.x if denoised is None else denoised.to(request.x)
                    self.callback(step, latent, latent, total)

            with stopping_with_prompt() as interrupted:
                return self.remote.sample(request, on_progress, interrupted)


def _name_of(sampler: Any) -> str:
    """Of a sampler that is not in ComfyUI's list."""
    function = getattr(sampler, "sampler_function", None)
    return str(getattr(function, "__name__", type(sampler).__name__)).removeprefix("sample_")


_OF_SEVERAL = "CFGGuider.sample.<locals>.callback"
"""ComfyUI's own, around another one: of several latents in one it takes them apart."""


def _is_comfyuis(callback: Any) -> bool:
    """Whether a callback is none, or that of ComfyUI's nodes, which reads the denoised latent alone."""
    if getattr(callback, "__qualname__", "") == _OF_SEVERAL and callback.__module__ == "comfy.samplers":
        return _is_comfyuis(inspect.getclosurevars(callback).nonlocals.get("packed_callback"))
    return callback is None or (
        getattr(callback, "__module__", "") == "latent_preview"
        and getattr(callback, "__qualname__", "") == "prepare_callback.<locals>.callback"
    )


def _keeps_denoised(callback: Any) -> bool:
    """Whether a callback of ComfyUI's nodes keeps the denoised latent for an output."""
    if callback is None:
        return False
    cells = dict(zip(callback.__code__.co_freevars, callback.__closure__ or (), strict=True))
    return "x0_output_dict" in cells and cells["x0_output_dict"].cell_contents is not None
