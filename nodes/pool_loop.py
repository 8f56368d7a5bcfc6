"""ComfyUI's hook around every sampler: hands the whole denoising loop to the pool, or says why it cannot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from comfy.cli_args import LatentPreviewMethod, args
from comfy.patcher_extension import WrapperExecutor
from tqdm.auto import trange

from parallel_runtime.networks.comfyui.node_rules import CFG
from parallel_runtime.networks.comfyui.seam import IN_LOOP
from parallel_runtime.networks.tables.blocks import LATENT_SHAPES
from parallel_runtime.networks.tables.comfyui import find_network
from parallel_runtime.requests.comfyui_code import HostLoop
from parallel_runtime.requests.requests import Sample, concat_name, sampling_name, share_name
from parallel_runtime.said import Said, said
from parallel_runtime.sampling.own_timesteps import OwnTimestep

from .asked_loop import AskedLoop, prediction_name, read_sampling
from .carried_guidance import read_guider
from .carried_patches import closure_of
from .interrupt import stopping_with_prompt
from .next_prompt import NEXT, Start
from .pool_obstacles import find_obstacles, guider_obstacles, sampler_name
from .transformer_call import TransformerCall, split_branches, split_extra_channels
from .transportable import call_obstacles

if TYPE_CHECKING:
    from workers.client.node_requests import LoopRequest


def run_sampler(
    executor: WrapperExecutor, guider: Any, sigmas: torch.Tensor, extra_args: dict[str, Any], callback: Any,
    noise: torch.Tensor, latent_image: torch.Tensor, denoise_mask: torch.Tensor | None = None,
    disable_pbar: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Called by ComfyUI's guider in place of any node's sampler, with arguments and result of KSAMPLER.sample."""
    arguments = (guider, sigmas, extra_args, callback, noise, latent_image, denoise_mask, disable_pbar)
    remote, sampler = guider.inner_model.parallel_remote, executor.class_obj
    if inner := executor.wrappers[executor.idx + 1 :]:
        # This one was there first, so those of other nodes come after it; but what they do is around a sampler.
        return WrapperExecutor(executor.original, sampler, [*inner, run_sampler], 0).execute(*arguments)
    latent, found = None, guider_obstacles(guider)
    name = sampler_name(sampler)
    if name is None:
        function = getattr(sampler, "sampler_function", None)
        own = str(getattr(function, "__name__", type(sampler).__name__)).removeprefix("sample_")
        found.append(said("the sampler {name}", name=own))
    elif not found:
        asked = AskedLoop(remote, name, sampler, guider, extra_args, callback, noise, latent_image, denoise_mask)
        latent, found = _run_in_pool(asked, sigmas, disable_pbar)
    remote.notices.loop(found)
    second = getattr(getattr(guider, "uncond_inner", None), "parallel_remote", None)  # of a guider of two models
    if second is not None:
        second.notices.loop(found)
    return executor(*arguments) if latent is None else latent


def _run_in_pool(asked: AskedLoop, sigmas: torch.Tensor, disable_pbar: bool) -> tuple[torch.Tensor | None, list[Said]]:
    """The finished latent; None where ComfyUI's own loop has to run, and why, or where there is nothing to do."""
    steps, sampling = len(sigmas) - 1, asked.sampling
    found = find_obstacles(asked, steps)
    if found or steps < 1:
        return None, found
    x = asked.start(sigmas)
    calls = asked.evaluate_dry(x, sigmas[0].expand(x.shape[0]))
    own_timesteps = asked.own_timesteps(calls, x, sigmas[0])
    staged, cfg = asked.remote.stages > 1, asked.guider.cfg if asked.rule.code == CFG else None
    found = call_obstacles(calls, tuple(x.shape), asked.rule.conds, cfg)
    if staged and any(LATENT_SHAPES in call.conditioning for call in calls):
        found.append(said("several latents in one"))
    if own_timesteps is None or (own_timesteps and staged):
        found.append(said("timesteps of the model's own"))
    if found or own_timesteps is None:
        return None, found
    request = _request(asked, calls, x, sigmas, own_timesteps)
    latent = _sample(asked, request, disable_pbar)
    NEXT.used(partial(_ahead, asked, calls, sigmas, own_timesteps), asked.remote.served)
    if request.job.host is None:
        latent = sampling.inverse_noise_scaling(sigmas[-1], latent)
    return latent, found


def _request(
    asked: AskedLoop, calls: list[TransformerCall], x: torch.Tensor, sigmas: torch.Tensor,
    own_timesteps: Mapping[int, Mapping[str, OwnTimestep]],
) -> LoopRequest:  # fmt: skip
    from workers.client.node_requests import LoopRequest

    sampling = asked.sampling
    host, beside = _host_loop(asked) if asked.by_comfyui else (None, {})
    # The network does more around a call than ComfyUI's process has done.
    network = find_network(type(asked.model.diffusion_model))
    in_loop = {IN_LOOP: True} if network is not None and network.rescales else {}
    branches = {index: conditioning | in_loop for index, conditioning in split_branches(calls).items()}
    concat = {concat_name(index): each for index, each in split_extra_channels(calls, x.shape[1]).items()}
    own = [(index, name, each) for index, named in own_timesteps.items() for name, each in named.items()]
    inpaint = _inpaint(asked)
    job = Sample(
        model="",
        branches=(),
        host=host,
        prediction="flow" if host is not None else prediction_name(sampling),
        sampler=asked.name,
        cfg=float(asked.guider.cfg),
        inpaint=bool(inpaint),
        inpaint_clean=bool(inpaint) and not asked.masks_noised,
        preview=_previews(asked),
        concat=bool(concat),
        joined=len(calls) == 1,
        own_timesteps=tuple((index, name, each.begin) for index, name, each in own),
    )
    tensors = {
        "x": x,
        "sigmas": sigmas.float(),
        # A sigma of 0 is never evaluated, and has no place in some tables.
        "timesteps": torch.where(sigmas > 0, sampling.timestep(sigmas).float(), 0.0),
        **concat,
        **inpaint,
        **{sampling_name(name): tensor for name, tensor in beside.items()},
        **{share_name(index, name): each.share for index, name, each in own},
    }
    return LoopRequest(job, branches, tensors)


def _ahead(
    asked: AskedLoop, calls: list[TransformerCall], sigmas: torch.Tensor,
    own_timesteps: Mapping[int, Mapping[str, OwnTimestep]], seed: int, another: int,
) -> Start | None:  # fmt: skip
    """What has the ranks begin with this loop with another seed; None where its noise is not the seed's."""
    if not torch.equal(asked.noise, _noise(asked.noise, seed)):
        return None
    other = replace(asked, noise=_noise(asked.noise, another), extra_args={**asked.extra_args, "seed": another})
    return asked.remote.ahead(_request(other, calls, other.start(sigmas), sigmas, own_timesteps))


def _noise(like: torch.Tensor, seed: int) -> torch.Tensor:
    """As ComfyUI draws it for a latent."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(like)


def _previews(asked: AskedLoop) -> bool:
    """Whether each step's denoised latent comes: as each prompt may set anew, or as a node puts out the last one's."""
    # A step's preview cannot be left out because a later one comes for certain.
    each_may_be_last = asked.remote.stages > 1 or asked.name == "dpm_adaptive"
    keeps_denoised = closure_of(asked.callback).get("x0_output_dict") is not None
    return args.preview_method is not LatentPreviewMethod.NoPreviews or (each_may_be_last and keeps_denoised)


def _host_loop(asked: AskedLoop) -> tuple[HostLoop, Mapping[str, torch.Tensor]]:
    """The loop by ComfyUI's own code, and its tensors."""
    code, data = asked.remote.model.comfyui, read_sampling(asked.sampling)
    assert code is not None
    assert data is not None
    bases, values, tensors = data
    loop = HostLoop(
        comfyui=code,
        options=dict(asked.sampler.extra_options),
        seed=asked.extra_args["seed"],
        noise_device=asked.noise.device.type,
        bases=bases,
        values=values,
        tensors=tuple(tensors),
        guider=read_guider(asked.guider),
        guidance=asked.guidance,
        all_branches=asked.all_branches,
    )
    return loop, tensors


def _inpaint(asked: AskedLoop) -> dict[str, torch.Tensor]:
    """Tensors of a noise mask; none where there is none."""
    noise, mask = asked.noise, asked.denoise_mask
    if mask is None:
        return {}
    if asked.sampler.inpaint_options.get("random", False):
        # ddim: ComfyUI puts another noise under the mask than the one it starts from.
        generator = torch.Generator("cpu").manual_seed(asked.extra_args["seed"] + 1)
        noise = torch.randn(noise.shape, generator=generator).to(noise)
    return {"mask": mask.expand_as(noise), "latent_image": asked.latent_image.expand_as(noise), "noise": noise}


def _sample(asked: AskedLoop, request: LoopRequest, disable_pbar: bool) -> torch.Tensor:
    with trange(request.steps, disable=disable_pbar) as bar, stopping_with_prompt() as interrupted:

        def on_progress(step: int, total: int, denoised: torch.Tensor | None) -> None:
            bar.update()
            if asked.callback is not None:
                latent = request.x if denoised is None else denoised.to(request.x)
                asked.callback(step, latent, latent, total)

        return asked.remote.sample(request, on_progress, interrupted)
