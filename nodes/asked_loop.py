"""A denoising loop as a node asks ComfyUI for it, and what one of its evaluations hands to the transformer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import comfy.model_base
import comfy.model_sampling
import torch

from parallel_runtime.networks.comfyui.module_tree import class_name
from parallel_runtime.networks.comfyui.node_rules import AROUND_GUIDER, CFG, GUIDER_RULES, GuiderRule
from parallel_runtime.requests.comfyui_code import Guidance, Scalar
from parallel_runtime.said import Said, said
from parallel_runtime.sampling.own_timesteps import OwnTimestep, are_plain, find_own_timesteps
from parallel_runtime.sampling.samplers import SAMPLERS

from .carried_guidance import PLACES, read_guidance
from .transformer_call import TransformerCall, split_timesteps

if TYPE_CHECKING:
    from .remote_transformer import RemoteTransformer

_PREDICTIONS = {
    "flow": comfy.model_sampling.CONST,
    "eps": comfy.model_sampling.EPS,
    "v_prediction": comfy.model_sampling.V_PREDICTION,
}
_OF_A_CLASS = {"__module__", "__doc__", "__qualname__", "__static_attributes__", "__firstlineno__"}
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_RULES = ("calculate_input", "calculate_denoised", "noise_scaling", "inverse_noise_scaling")


def prediction_name(sampling: Any) -> str:
    """The pool's word for what a model's output means; "" where its model sampling has rules that no rank knows."""
    own = type(sampling)
    for name, plain in _PREDICTIONS.items():
        if issubclass(own, plain) and all(getattr(own, rule) is getattr(plain, rule) for rule in _RULES):
            return name
    return ""


def sampling_obstacles(sampling: Any) -> list[Said]:
    """Name where ComfyUI's model sampling differs from what the pool's own samplers know."""
    found = [] if prediction_name(sampling) else [said("the model sampling {name}", name=type(sampling).__name__)]
    scales = {"noise_scale": said("a noise scale"), "sigma_data": said("a scale of the data")}
    return found + [text for setting, text in scales.items() if getattr(sampling, setting, 1.0) != 1.0]


def read_sampling(sampling: Any) -> tuple[tuple[str, ...], dict[str, Scalar], dict[str, torch.Tensor]] | None:
    """A model sampling as data: the names of its classes, and what it holds; None for one with rules of its own."""
    kind = type(sampling)
    joined = vars(kind).keys() <= _OF_A_CLASS  # ComfyUI joins two classes for each model
    bases = kind.__bases__ if joined else (kind,)
    if any(getattr(comfy.model_sampling, base.__name__, None) is not base for base in bases):
        return None
    held = {name: value for name, value in vars(sampling).items() if name not in _OF_EVERY_MODULE}
    tensors = {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}
    tensors |= {name: value for name, value in sampling._buffers.items() if value is not None}
    values = {name: value for name, value in held.items() if isinstance(value, Scalar)}
    if sampling._parameters or sampling._modules or held.keys() - tensors.keys() - values.keys():
        return None
    return tuple(base.__name__ for base in bases), values, tensors


@dataclass(frozen=True)
class AskedLoop:
    """The transformer of the guider's model, a sampler of ComfyUI's list and its name there, a guider that ranks know,
    and what KSAMPLER.sample gets."""

    remote: RemoteTransformer
    name: str
    sampler: Any
    guider: Any
    extra_args: Mapping[str, Any]
    callback: Any
    noise: torch.Tensor
    latent_image: torch.Tensor
    denoise_mask: torch.Tensor | None

    @property
    def title(self) -> Said:
        return said("{name} with options", name=self.name) if self.sampler.extra_options else Said(self.name)

    @property
    def model(self) -> Any:
        return self.guider.inner_model

    @property
    def sampling(self) -> Any:
        return self.model.model_sampling

    @property
    def options(self) -> Mapping[str, Any]:
        return self.extra_args["model_options"]

    @property
    def rule(self) -> GuiderRule:
        return GUIDER_RULES[class_name(type(self.guider))]

    @property
    def guidance(self) -> tuple[Guidance, ...]:
        """Functions around guidance; where `loop_obstacles` has none."""
        return read_guidance(self.options, self.guider)

    @property
    def all_branches(self) -> bool:
        """Whether each evaluation is of all branches that one of them is of."""
        scaled = any(each.place == AROUND_GUIDER for each in self.guidance)
        return not scaled or bool(self.options.get("disable_cfg1_optimization"))

    @cached_property
    def guided(self) -> bool:
        """Whether guidance is more than one scale between two predictions."""
        return bool(self.guidance) or self.rule.code != CFG

    @cached_property
    def by_comfyui(self) -> bool:
        """Whether ComfyUI's own code for the sampler is to run in the ranks, rather than ours."""
        own = self.name in SAMPLERS and not self.sampler.extra_options
        return not own or self.guided or bool(sampling_obstacles(self.sampling))

    @property
    def masks_noised(self) -> bool:
        """Whether the model sees what a mask keeps with the noise of each step."""
        return type(self.model).scale_latent_inpaint is comfy.model_base.BaseModel.scale_latent_inpaint

    def start(self, sigmas: torch.Tensor) -> torch.Tensor:
        """The noised latent that the loop starts from."""
        most = self.sampler.max_denoise(self.guider, sigmas)
        x: torch.Tensor = self.sampling.noise_scaling(sigmas[0], self.noise, self.latent_image, most)
        return x

    def evaluate_dry(self, x: torch.Tensor, sigma: torch.Tensor) -> list[TransformerCall]:
        """One step as ComfyUI hands it to the transformer; functions around guidance would see no predictions."""
        options = {name: value for name, value in self.options.items() if name not in PLACES}
        # Other samplers look at the negative prediction at any scale, and a scale may be another at a later sigma.
        if self.name.endswith("cfg_pp") or not self.all_branches:
            options["disable_cfg1_optimization"] = True
        with self.remote.capture(x.shape[1]) as calls:
            self.guider(x, sigma, model_options=options, seed=self.extra_args["seed"])
        return calls

    def own_timesteps(
        self, calls: list[TransformerCall], x: torch.Tensor, sigma: torch.Tensor
    ) -> Mapping[int, Mapping[str, OwnTimestep]] | None:
        """The timesteps that the model makes of a step's, by the calls at this sigma; None where they are no shares."""
        rows, told = x.shape[0], self.sampling.timestep
        timestep, found = told(sigma).float().expand(rows), split_timesteps(calls)
        if are_plain(found, timestep):
            return {}
        later = sigma / 2
        others = split_timesteps(self.evaluate_dry(x, later.expand(rows)))
        return find_own_timesteps((timestep, found), (told(later).float().expand(rows), others))
