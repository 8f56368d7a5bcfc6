"""The denoising loop of one `Sample` request by ComfyUI's own guider and sampler, run alike on every rank."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import RequestError
from ..networks.comfyui.comfy_code import use_comfyui
from ..networks.comfyui.live_patches import make_guidance
from ..networks.comfyui.node_rules import AROUND_GUIDER, CFG, GUIDER_RULES
from ..requests.comfyui_code import Guider, HostLoop, Scalar
from ..requests.conditioning import BRANCHES, OPTIONS, Conditioning
from ..requests.patches import CARRIED, REPLACED
from ..requests.requests import Sample, sampling_name
from ..sampling.denoiser import Inpaint, check_guidance
from .denoise import Evaluation, Loop, Told

_ADAPTIVE = "dpm_adaptive"
_WRAPPERS, _REPLACED = "wrappers", "patches_replace"


class HostDenoising(Loop):
    """A loop of ComfyUI's samplers. Arguments as of `Loop`; RequestError for a sampler, guider or function that this
    ComfyUI does not have, or that no rank may run, ConfigurationError where this rank's host has no ComfyUI."""

    def __init__(self, request: Sample, host: HostLoop, dtype: torch.dtype, device: torch.device, unlike: bool):
        super().__init__(request, dtype, unlike)
        self._host, self._device = host, device
        if unlike and request.sampler == _ADAPTIVE:  # ranks would take steps of other lengths
            text = "Sampler {name} chooses its steps by what it sees, which GPUs of several models see otherwise."
            raise RequestError(text, "Choose another sampler, or GPUs of one model.", name=repr(_ADAPTIVE))
        use_comfyui(host.comfyui.folder, {**host.comfyui.options, "cpu": device.type == "cpu"})
        self._function = sampler_function(request.sampler)
        self._guider = load_guider(host.guider, [branch.index for branch in request.branches])
        if host.guider.code == CFG:
            check_guidance(len(request.branches), request.cfg)
        make_guidance(host.guidance, None)

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Also refuse noise that ComfyUI would draw on another kind of device: samplers draw it where the latent is."""
        super().check(tensors)
        if self._device.type != self._host.noise_device:
            text = "The noise of this sampler is drawn on {noise_device}, and this worker is on {device}."
            fix = "Run the workers on the kind of device that ComfyUI uses."
            raise RequestError(text, fix, noise_device=self._host.noise_device, device=self._device)
        self._make_sampling(tensors)

    def _steps(self, evaluate: Evaluation, tensors: Mapping[str, Tensor], on_step: Told) -> Tensor:
        sampling = self._make_sampling(tensors)
        model = GuidedModel(self._guider, evaluate, sampling, self.inpaint(tensors), tensors["sigmas"])
        guidance = make_guidance(self._host.guidance, sampling)
        return model.sample(self._function, self._host, tensors["x"], guidance, on_step)

    def _make_sampling(self, tensors: Mapping[str, Tensor]) -> torch.nn.Module:
        held = {name: tensors[sampling_name(name)] for name in self._host.tensors}
        return make_sampling(self._host.bases, self._host.values, held)


def load_guider(guider: Guider, indices: Sequence[int]) -> Any:
    """A guider of ComfyUI's with what it reads of its own, for branches of these indices; RequestError where it is none
    that ranks know, has no such branches, or this ComfyUI does not have it."""
    rule = GUIDER_RULES.get(guider.code)
    inside = rule is not None and {*indices} <= {*range(len(rule.conds))}
    if rule is None or rule.code != guider.code or not inside or list(indices) != sorted(set(indices)):
        text = "The workers were sent the guider {code} with branches {indices}."
        raise RequestError(text, "Report this.", code=guider.code, indices=indices)
    module, _, name = rule.code.partition(":")
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        text = "The ComfyUI of the workers has no guider {name}: {error}."
        raise RequestError(text, "Update it.", name=name, error=error) from error
    made = object.__new__(kind)
    # Each has a scale, which functions around it change and put back, whether it looks at it or not.
    made.__dict__.update({"cfg": 1.0, **{name: guider.values.get(name) for name in rule.values}})
    made.conds = {rule.conds[index]: [{"branch": branch}] for branch, index in enumerate(indices)}
    return made


class GuidedModel:
    """What ComfyUI's samplers take for the model: called for a denoised latent, and asked for its model sampling. The
    guider is one of `load_guider`, the sigmas are the loop's."""

    def __init__(self, guider: Any, evaluate: Evaluation, sampling: Any, inpaint: Inpaint | None, sigmas: Tensor):
        self._evaluate, self._sampling, self._inpaint, self._sigmas = evaluate, sampling, inpaint, sigmas
        guider.inner_model = SimpleNamespace(model_sampling=sampling)
        objects = partial(getattr, guider.inner_model)
        guider.model_patcher = SimpleNamespace(model=guider.inner_model, get_model_object=objects)
        for (cond,) in guider.conds.values():
            # Of which a function leaves some out.
            cond["model_conds"] = dict.fromkeys(evaluate.branches[cond["branch"]].arguments)
        self.inner_model = guider

    def sample(
        self, function: Callable[..., Tensor], host: HostLoop, x: Tensor, guidance: Mapping[str, Any], on_step: Told
    ) -> Tensor:
        """Return the finished latent as ComfyUI's KSAMPLER does, by a `sampler_function`: of x, noised to the first
        sigma, with entries of `model_options` (`guidance`; see live_patches.py)."""
        functions = {name: each for name, each in guidance.items() if name != AROUND_GUIDER}
        wrappers = {"calc_cond_batch": [self._predict], AROUND_GUIDER: guidance.get(AROUND_GUIDER, [])}
        self.inner_model.model_options = {
            "transformer_options": {_WRAPPERS: {kind: {"parallel_dit": each} for kind, each in wrappers.items()}},
            "disable_cfg1_optimization": host.all_branches,
            **functions,
        }
        sigmas = self._sigmas.clone()  # UniPC writes into them
        extra_args = {"model_options": self.inner_model.model_options, "seed": host.seed}
        latent = function(
            self, x.clone(), sigmas, extra_args=extra_args, disable=True,
            callback=lambda state: on_step(int(state["i"]), state["denoised"]), **host.options,
        )  # fmt: skip
        return self._sampling.inverse_noise_scaling(sigmas[-1], latent)

    def __call__(self, x: Tensor, sigma: Tensor, model_options: Mapping[str, Any], seed: int) -> Tensor:
        sigma = self._evaluate.agreed(sigma)  # functions decide by it whether they evaluate once more
        inpaint = self._inpaint
        if inpaint is not None:
            mask, kept = inpaint.mask, inpaint.latent_image
            if change := model_options.get("denoise_mask_function"):
                mask = change(sigma, mask, extra_options={"model": self.inner_model, "sigmas": self._sigmas})
                inpaint = replace(inpaint, mask=mask)
            level = sigma.reshape(-1, *[1] * (x.ndim - 1))
            noised = kept if inpaint.clean else self._sampling.noise_scaling(level, inpaint.noise.clone(), kept)
            x = x * mask + noised * (1.0 - mask)
        denoised: Tensor = self.inner_model(x, sigma, model_options, seed)
        return denoised if inpaint is None else inpaint.after(denoised)

    def _predict(
        self, executor: Any, model: Any, conds: Sequence[Any], x: Tensor, sigma: Tensor, model_options: Any
    ) -> list[Tensor]:
        """For ComfyUI's `calc_cond_batch`: a denoised latent for each conditioning, of one part; zeros for None."""
        options = {name: each for name, each in model_options["transformer_options"].items() if name != _WRAPPERS}
        inside = options.pop(_REPLACED, {})
        replaced = [(kind, key, patch) for kind, several in inside.items() for key, patch in several.items()]
        asked: dict[int, tuple[int, Conditioning]] = {}
        for index, cond in enumerate(conds):
            if cond is not None:
                branch = cond[0]["branch"]
                given, left = self._evaluate.branches[branch], cond[0]["model_conds"].keys()
                asked[index] = branch, _told(given, left, index, options, replaced)
        sampling, denoised = self._sampling, [torch.zeros_like(x) for _ in conds]
        scaled, timestep = sampling.calculate_input(sigma, x), sampling.timestep(sigma).float()
        outputs = self._evaluate.some(scaled, timestep, list(asked.values()))
        for index, output in zip(asked, outputs, strict=True):
            denoised[index] = sampling.calculate_denoised(sigma, output, x)
        return denoised


def _told(
    conditioning: Conditioning, left: Set[str], index: int, options: Mapping[str, Any], replaced: Sequence[Any]
) -> Conditioning:
    """What ComfyUI's own network is told of the branch that ComfyUI calls `index` in an evaluation: those arguments
    that are left, with options and patches (kind, key, patch) for its inside. Diffusers' network reads no options."""
    arguments = {name: value for name, value in conditioning.arguments.items() if name in left}
    own: dict[str, Any] | None = arguments.get(OPTIONS)
    if own is not None and (own.get(BRANCHES) != [index] or options or replaced):
        arguments[OPTIONS] = {**own, **options, BRANCHES: [index]}
        if replaced:
            carried = own.get(CARRIED, {})
            arguments[OPTIONS][CARRIED] = {**carried, REPLACED: [*carried.get(REPLACED, ()), *replaced]}
    elif len(arguments) == len(conditioning.arguments):
        return conditioning
    return Conditioning(arguments, conditioning.shared)


def make_sampling(bases: Sequence[str], values: Mapping[str, Scalar], tensors: Mapping[str, Tensor]) -> torch.nn.Module:
    """A model sampling of ComfyUI's of these classes, values and tensors; RequestError where it has no such class."""
    code = importlib.import_module("comfy.model_sampling")
    kinds: list[Any] = [getattr(code, name, None) for name in bases]
    for name, kind in zip(bases, kinds, strict=True):
        if not isinstance(kind, type) or kind.__module__ != code.__name__:
            raise RequestError("The ComfyUI of the workers has no model sampling {name}.", "Update it.", name=name)
    joined: Any = type("ModelSampling", tuple(kinds), {})
    made: Any = joined.__new__(joined)
    nn.Module.__init__(made)
    for name, value in values.items():
        setattr(made, name, value)
    for name, tensor in tensors.items():
        made.register_buffer(name, tensor)
    return made


def sampler_function(name: str) -> Callable[..., Tensor]:
    """What a sampler of ComfyUI's list calls; RequestError where this ComfyUI does not have it."""
    code = importlib.import_module("comfy.samplers")
    if name not in code.SAMPLER_NAMES:
        raise RequestError("The ComfyUI of the workers has no sampler {name}.", "Update it.", name=name)
    return code.sampler_object(name).sampler_function
