"""Why a loop has to go step by step, as far as that can be told before anything is evaluated."""

from __future__ import annotations

from typing import Any

import comfy.samplers
import torch

from parallel_runtime.config import ParallelConfig
from parallel_runtime.memory import device_kind
from parallel_runtime.networks.comfyui.module_tree import class_name
from parallel_runtime.requests.comfyui_code import Scalar
from parallel_runtime.said import Said, said
from parallel_runtime.sampling.samplers import SAMPLERS

from .asked_loop import AskedLoop, read_sampling, sampling_obstacles
from .carried_guidance import guider_obstacle
from .carried_patches import act_always, closure_of, code_of
from .transportable import condition_obstacles, loop_obstacles

_OF_NODES = "latent_preview:prepare_callback.<locals>.callback"
_OF_SEVERAL = "comfy.samplers:CFGGuider.sample.<locals>.callback"  # around another one, for several latents in one
_RULES = ("sampling_function", "calc_cond_batch", "cfg_function", "KSamplerX0Inpaint")  # what packs may replace


def sampler_name(sampler: Any) -> str | None:
    """Which sampler of ComfyUI's list a SAMPLER object is; None for any other."""
    if type(sampler) is not comfy.samplers.KSAMPLER or "sample" in vars(sampler):
        return None
    random = bool(sampler.inpaint_options.get("random", False))
    for name in comfy.samplers.SAMPLER_NAMES:
        plain = comfy.samplers.sampler_object(name)
        same_noise = bool(plain.inpaint_options.get("random", False)) == random
        if same_noise and _same(plain.sampler_function, sampler.sampler_function):
            return name
    return None


def guider_obstacles(guider: Any) -> list[Said]:
    """Name where an evaluation by the guider that samples is none that ranks make."""
    if (found := guider_obstacle(class_name(type(guider)))) is not None:
        return [found]
    if vars(guider).keys() & vars(comfy.samplers.CFGGuider).keys():
        return [said("the guider {name}", name=type(guider).__name__)]
    changed = [name for name in _RULES if getattr(comfy.samplers, name).__module__ != "comfy.samplers"]
    return [said("another comfy.samplers.{name}", name=name) for name in changed]


def _same(one: Any, other: Any) -> bool:
    """Whether two functions do the same; ComfyUI makes some anew for each object (dpm_fast)."""
    made = one.__module__ == "comfy.samplers" and "<locals>" in one.__qualname__
    return one is other or (made and getattr(other, "__code__", None) is one.__code__)


def find_obstacles(loop: AskedLoop, steps: int) -> list[Said]:
    """Name everything that the pool would do otherwise than ComfyUI's own loop."""
    found = loop_obstacles(loop.options)
    if not act_always(loop.options.get("transformer_options", {})):
        found.append(said("a function inside of the model for a part of the steps"))
    carried = not found
    found += condition_obstacles(loop.guider.conds)
    if carried and loop.remote.stages > 1:
        found += _stage_obstacles(loop, steps)
    elif carried and loop.by_comfyui:
        found += host_obstacles(loop)
    if not is_comfyuis(loop.callback):
        found.append(said("a node that looks at each step"))
    if loop.denoise_mask is not None and not (loop.masks_noised or _kept_clean(loop)):
        found.append(said("the noise mask of {name}", name=type(loop.model).__name__))
    if carried and loop.by_comfyui and not same_noise(loop.guider.model_patcher.load_device, loop.remote.model.config):
        found.append(said("noise of a device that does not take part"))
    return found


def host_obstacles(loop: AskedLoop) -> list[Said]:
    """Name what of a loop by ComfyUI's own code is no data."""
    options, found = loop.sampler.extra_options, []
    # Samplers take what they churn up from the process's own random numbers.
    if options.get("s_churn") or not all(isinstance(value, Scalar) for value in options.values()):
        found.append(said("the sampler {name}", name=loop.title))
    if read_sampling(loop.sampling) is None:
        found.append(said("the model sampling {name}", name=type(loop.sampling).__name__))
    return found


def _stage_obstacles(loop: AskedLoop, steps: int) -> list[Said]:
    """What stages do not know: they run our own samplers."""
    found = sampling_obstacles(loop.sampling)
    if loop.name not in SAMPLERS or loop.sampler.extra_options:
        found.append(said("the sampler {name} over stages", name=loop.title))
    if loop.guided:
        found.append(said("a guider or function of a node"))
    if 0 < steps < loop.remote.model.config.warmup_steps:
        found.append(said("fewer steps than PipeFusion warms up for"))
    return found


def _kept_clean(loop: AskedLoop) -> bool:
    """Whether the model sees what a mask keeps as it is, at each step."""
    kept, noise, sigma = loop.latent_image, loop.noise, loop.noise.new_ones(loop.noise.shape[0])
    scale = loop.model.scale_latent_inpaint
    return scale(x=noise, sigma=sigma, noise=noise, latent_image=kept, denoise_mask=loop.denoise_mask) is kept


def same_noise(device: torch.device, config: ParallelConfig) -> bool:
    """Whether ComfyUI's samplers draw the same noise in a pool as on `device`: both are CPUs, or GPUs of one kind."""
    from workers.launch import resolve_devices

    ranks = resolve_devices(config, torch.cuda.device_count)
    if device.type == "cpu" or device.type != ranks.device_type:
        return device.type == ranks.device_type
    return device_kind(torch.device("cuda", ranks.devices[0])) == device_kind(device)


def is_comfyuis(callback: Any) -> bool:
    """Whether a callback is none, or that of ComfyUI's nodes, which reads the denoised latent alone."""
    if code_of(callback) == _OF_SEVERAL:
        return is_comfyuis(closure_of(callback).get("packed_callback"))
    return callback is None or code_of(callback) == _OF_NODES
