"""A denoising loop as it goes on the wire: the job, and the tensors that come along."""

from __future__ import annotations

import torch

from parallel_runtime.requests.requests import (
    ConditioningRef,
    PatchNames,
    Sample,
    concat_name,
    sampling_name,
    share_name,
)

from .conditioning_cache import ConditioningCache
from .requests import LoopRequest


def loop_job(
    model: str, request: LoopRequest, cache: ConditioningCache, patches: PatchNames = ("", "")
) -> tuple[Sample, dict[str, torch.Tensor]]:
    """The job, and its tensors; the conditionings' only where the pool does not hold them.

    Args:
        model: its name in the pool.
        patches: names of the weight patches that the ranks have for it.
    """
    references: list[ConditioningRef] = []
    tensors: dict[str, torch.Tensor] = {}
    dropped: tuple[int, ...] = ()
    for branch in request.branches:
        reference, new, old = cache.refer(branch.conditioning, branch.index)
        references.append(reference)
        tensors |= new
        dropped += old
    timesteps = request.sigmas if request.timesteps is None else request.timesteps
    tensors |= {"x": request.x, "sigmas": request.sigmas, "timesteps": timesteps}
    for branch, channels in zip(request.branches, request.concat, strict=False):
        tensors[concat_name(branch.index)] = channels
    if request.inpaint is not None:
        inpaint = request.inpaint
        tensors |= {"mask": inpaint.mask, "latent_image": inpaint.latent_image, "noise": inpaint.noise}
    tensors |= {sampling_name(name): tensor for name, tensor in request.sampling.items()}
    own = [(index, name, each) for index, named in request.own_timesteps.items() for name, each in named.items()]
    tensors |= {share_name(index, name): each.share for index, name, each in own}
    job = Sample(
        model=model,
        sampler=request.sampler,
        branches=tuple(references),
        cfg=request.cfg,
        seed=request.seed,
        noise_device=request.noise_device,
        inpaint=request.inpaint is not None,
        inpaint_clean=request.inpaint is not None and request.inpaint.clean,
        own_timesteps=tuple((index, name, each.begin) for index, name, each in own),
        preview=request.preview,
        dropped=dropped,
        prediction=request.prediction,
        concat=bool(request.concat),
        patches=patches,
        joined=request.joined,
        host=request.host,
    )
    return job, tensors
