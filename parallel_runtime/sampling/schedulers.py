"""Which sampler does what a scheduler class of diffusers does, for models that name one in scheduler_config.json.

ComfyUI's results are the norm. A sampler on the scheduler's own sigmas gives the scheduler's result where the two
projects agree; docs/samplers.md says where they do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ..errors import RequestError
from ..said import said
from .samplers import SAMPLERS, Sampler

SAMPLER_OF: Mapping[str, str] = MappingProxyType(
    {
        "FlowMatchEulerDiscreteScheduler": "euler",
        "EulerDiscreteScheduler": "euler",
        "EulerAncestralDiscreteScheduler": "euler_ancestral",
        "HeunDiscreteScheduler": "heun",
        "FlowMatchHeunDiscreteScheduler": "heun",
        "DDIMScheduler": "ddim",
        "DDPMScheduler": "ddpm",
        "DPMSolverMultistepScheduler": "dpmpp_2m",
        "UniPCMultistepScheduler": "uni_pc_bh2",
        "LCMScheduler": "lcm",
        "FlowMatchLCMScheduler": "lcm",
    }
)
"""Class name -> name of the sampler."""


def find_by_scheduler_class(name: str) -> Sampler:
    """Return the sampler that takes the place of a scheduler class.

    Raises:
        RequestError: no sampler does; with the classes that have one.
    """
    if name not in SAMPLER_OF:
        raise RequestError(
            said("No sampler of the pool takes the place of {name}.", name=name),
            said("Choose a sampler by name, or a model with one of {sampler_of}.", sampler_of=", ".join(SAMPLER_OF)),
        )
    return SAMPLERS[SAMPLER_OF[name]]
