"""Which of ComfyUI's samplers and guiders a node samples with: told by their code, as data can name it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import comfy.samplers

from parallel_runtime.networks.comfyui.module_tree import class_name
from parallel_runtime.said import Said, said

from .carried_guidance import guider_obstacle

_RULES = ("sampling_function", "calc_cond_batch", "cfg_function", "KSamplerX0Inpaint")
"""What an evaluation goes through, which other packs may have replaced."""


@dataclass(frozen=True)
class KnownSampler:
    """A sampler of ComfyUI's list.

    Args:
        name: there.
        options: arguments of its function.
        random_inpaint: noise of its own goes under a mask.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    random_inpaint: bool = False

    @property
    def title(self) -> Said:
        """In words."""
        return said("{name} with options", name=self.name) if self.options else Said(self.name)


def known_sampler(sampler: Any) -> KnownSampler | None:
    """The sampler of ComfyUI's list that a SAMPLER object is; None for any other."""
    if type(sampler) is not comfy.samplers.KSAMPLER or "sample" in vars(sampler):
        return None
    random = bool(sampler.inpaint_options.get("random", False))
    for name in comfy.samplers.SAMPLER_NAMES:
        plain = comfy.samplers.sampler_object(name)
        if (
            _same(plain.sampler_function, sampler.sampler_function)
            and bool(plain.inpaint_options.get("random", False)) == random
        ):
            return KnownSampler(name, dict(sampler.extra_options), random)
    return None


def guider_obstacles(guider: Any) -> list[Said]:
    """Name where an evaluation by a guider is none that ranks make.

    Args:
        guider: that samples, with the model of Parallel Loader.
    """
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
