"""ComfyUI's own samplers over a denoiser of ours. ComfyUI must be importable (host_code.py).

They ask their model for denoised latents, and read its model sampling; noise they draw from the request's seed, on the
device of the latent. So ranks that begin with the same bytes take the same steps.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ...errors import RequestError
from ...requests.requests import Scalar
from ...said import said

_Predict = Callable[[torch.Tensor, torch.Tensor], Sequence[torch.Tensor]]
_Told = Callable[[int, torch.Tensor], None]


def make_sampling(
    bases: Sequence[str], values: Mapping[str, Scalar], tensors: Mapping[str, torch.Tensor]
) -> torch.nn.Module:
    """A model sampling of ComfyUI's.

    Args:
        bases: classes of `comfy.model_sampling`.
        values, tensors: what it holds.

    Raises:
        RequestError: this ComfyUI has no such class.
    """
    code = importlib.import_module("comfy.model_sampling")
    kinds: list[Any] = [getattr(code, name, None) for name in bases]
    for name, kind in zip(bases, kinds, strict=True):
        if not isinstance(kind, type) or kind.__module__ != code.__name__:
            raise RequestError(
                said("The ComfyUI of the ranks has no model sampling {name}.", name=name), said("Update it.")
            )
    joined: Any = type("ModelSampling", tuple(kinds), {})
    made: Any = joined.__new__(joined)
    nn.Module.__init__(made)
    for name, value in values.items():
        setattr(made, name, value)
    for name, tensor in tensors.items():
        made.register_buffer(name, tensor)
    return made


class HostSampler:
    """A sampler of ComfyUI's list.

    Args:
        name: there.
        options: arguments of its function.

    Raises:
        RequestError: this ComfyUI does not have it.
    """

    def __init__(self, name: str, options: Mapping[str, Scalar]):
        code = importlib.import_module("comfy.samplers")
        if name not in code.SAMPLER_NAMES:
            raise RequestError(said("The ComfyUI of the ranks has no sampler {name}.", name=name), said("Update it."))
        self._function = code.sampler_object(name).sampler_function
        self._options = dict(options)

    def run(
        self,
        predict: _Predict,
        sampling: Any,
        x: torch.Tensor,
        sigmas: torch.Tensor,
        *,
        cfg: float,
        seed: int,
        inpaint: Any,
        guidance: Mapping[str, Any],
        on_step: _Told,
    ) -> torch.Tensor:
        """Return the finished latent as ComfyUI's KSAMPLER does.

        Args:
            predict: (model input, timestep) -> an output per CFG branch, float32.
            x: noised to sigmas[0].
            inpaint: mask, and what it keeps; see sampling/denoiser.py.
            guidance: entries of `model_options`; see live_guidance.py.
            on_step: called once a step; what it raises ends the run.
        """
        sigmas = sigmas.clone()  # UniPC writes into them
        model = _Model(predict, sampling, cfg, inpaint)
        latent = self._function(
            model,
            x.clone(),
            sigmas,
            extra_args={"model_options": {"transformer_options": {}, **guidance}, "seed": seed},
            callback=lambda state: on_step(int(state["i"]), state["denoised"]),
            disable=True,
            **self._options,
        )
        return sampling.inverse_noise_scaling(sigmas[-1], latent)


class _Model:
    """What ComfyUI's samplers take for the model: called for a denoised latent, and asked for its model sampling."""

    def __init__(self, predict: _Predict, sampling: Any, cfg: float, inpaint: Any):
        self._predict, self._sampling, self._cfg, self._inpaint = predict, sampling, cfg, inpaint
        model = SimpleNamespace(model_sampling=sampling)
        patcher = SimpleNamespace(model=model, get_model_object=self._object)
        self.inner_model = SimpleNamespace(inner_model=model, model_patcher=patcher, cfg=cfg)

    def _object(self, name: str) -> Any:
        if name != "model_sampling":
            raise AttributeError(f"the model in the pool has no {name}")
        return self._sampling

    def __call__(
        self, x: torch.Tensor, sigma: torch.Tensor, model_options: Mapping[str, Any], seed: int
    ) -> torch.Tensor:
        if self._inpaint is None:
            return self._guided(x, sigma, model_options)
        mask, kept = self._inpaint.mask, self._inpaint.latent_image
        level = sigma.reshape(-1, *[1] * (x.ndim - 1))
        noised = kept if self._inpaint.clean else self._sampling.noise_scaling(level, self._inpaint.noise.clone(), kept)
        out = self._guided(x * mask + noised * (1.0 - mask), sigma, model_options)
        return self._inpaint.after(out)

    def _guided(self, x: torch.Tensor, sigma: torch.Tensor, model_options: Mapping[str, Any]) -> torch.Tensor:
        """Classifier-free guidance by ComfyUI's code, with what nodes and samplers have set around it."""
        sampling = self._sampling
        outputs = self._predict(sampling.calculate_input(sigma, x), sampling.timestep(sigma).float())
        each = [sampling.calculate_denoised(sigma, output, x) for output in outputs]
        predicted = each if len(each) == 2 else [each[0], torch.zeros_like(x)]
        # What the functions ask of conditionings is whether they are there.
        conds: list[list[Any] | None] = [[], [] if len(each) == 2 else None]
        model = self.inner_model.inner_model
        for function in model_options.get("sampler_pre_cfg_function", []):
            predicted = function(
                {"conds": conds, "conds_out": predicted, "cond_scale": self._cfg, "timestep": sigma, "input": x,
                 "sigma": sigma, "model": model, "model_options": model_options}
            )  # fmt: skip
        code = importlib.import_module("comfy.samplers")
        denoised: torch.Tensor = code.cfg_function(
            model, predicted[0], predicted[1], self._cfg, x, sigma, model_options, conds[0], conds[1]
        )
        return denoised
