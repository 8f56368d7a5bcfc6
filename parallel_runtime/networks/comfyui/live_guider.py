"""A guider of ComfyUI's over the CFG branches that a rank has: what ComfyUI's samplers take for their model.

An evaluation is the guider's own code and that of functions around guidance. What both ask for conditionings goes
through ComfyUI's wrapper around that (CALC_COND_BATCH), where the branches of the request stand for them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from ...errors import RequestError
from ...requests.requests import Guider
from ...said import said
from .guider_rules import guider_code

_WRAPPERS, _REPLACED = "wrappers", "patches_replace"


@dataclass(frozen=True)
class Asked:
    """One branch of an evaluation.

    Args:
        branch: its place in the request.
        index: what ComfyUI calls it in this evaluation (cond_or_uncond).
        replaced: what stands for parts of the network in it: (kind, key, patch) each.
    """

    branch: int
    index: int
    replaced: Sequence[tuple[str, Any, Any]] = ()


class Evaluate(Protocol):
    """The transformer, over the branches of a request."""

    def some(self, x: torch.Tensor, timestep: torch.Tensor, asked: Sequence[Asked]) -> Sequence[torch.Tensor]:
        """An output for each, float32."""
        ...

    def agreed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same bytes on all ranks."""
        ...


def load_guider(guider: Guider, indices: Sequence[int]) -> Any:
    """A guider of ComfyUI's with what it reads of its own.

    Args:
        indices: of the branches, in their order.

    Raises:
        RequestError: it is none that ranks know, has no such branches, or this ComfyUI does not have it.
    """
    rule = guider_code(guider.code)
    if rule is None or list(indices) != sorted(set(indices)) or not {*indices} <= {*range(len(rule.conds))}:
        raise RequestError(
            said("The pool was sent the guider {code} with branches {indices}.", code=guider.code, indices=indices),
            "Report this.",
        )
    module, _, name = rule.code.partition(":")
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise RequestError(
            said("The ComfyUI of the ranks has no guider {name}: {error}.", name=name, error=error), said("Update it.")
        ) from error
    made = object.__new__(kind)
    made.__dict__.update({name: guider.values.get(name) for name in rule.values})
    # All that functions ask of a conditioning is whether it is there.
    made.conds = {rule.conds[index]: [branch] for branch, index in enumerate(indices)}
    return made


class GuidedModel:
    """What ComfyUI's samplers take for the model: called for a denoised latent, and asked for its model sampling.

    Args:
        guider: of `load_guider`.
        sampling: ComfyUI's model sampling.
        inpaint: mask, and what it keeps; see sampling/denoiser.py.
    """

    def __init__(self, guider: Any, evaluate: Evaluate, sampling: Any, inpaint: Any):
        self._evaluate, self._sampling, self._inpaint = evaluate, sampling, inpaint
        guider.inner_model = SimpleNamespace(model_sampling=sampling)
        guider.model_patcher = SimpleNamespace(model=guider.inner_model, get_model_object=self._object)
        self.inner_model = guider

    def options(self, guidance: Mapping[str, Any]) -> dict[str, Any]:
        """ComfyUI's `model_options` for this model, with functions around guidance (live_guidance.py)."""
        wrappers = {"calc_cond_batch": {"parallel_dit": [self._predict]}}
        # Which branches count is known: the others did not come.
        return {"transformer_options": {_WRAPPERS: wrappers}, "disable_cfg1_optimization": True, **guidance}

    def _object(self, name: str) -> Any:
        if name != "model_sampling":
            raise AttributeError(f"the model in the pool has no {name}")
        return self._sampling

    def __call__(
        self, x: torch.Tensor, sigma: torch.Tensor, model_options: Mapping[str, Any], seed: int
    ) -> torch.Tensor:
        sigma = self._evaluate.agreed(sigma)  # functions decide by it whether they evaluate once more
        if self._inpaint is None:
            return self._guided(x, sigma, model_options, seed)
        mask, kept = self._inpaint.mask, self._inpaint.latent_image
        level = sigma.reshape(-1, *[1] * (x.ndim - 1))
        noised = kept if self._inpaint.clean else self._sampling.noise_scaling(level, self._inpaint.noise.clone(), kept)
        out = self._guided(x * mask + noised * (1.0 - mask), sigma, model_options, seed)
        return self._inpaint.after(out)

    def _guided(
        self, x: torch.Tensor, sigma: torch.Tensor, model_options: Mapping[str, Any], seed: int
    ) -> torch.Tensor:
        denoised: torch.Tensor = self.inner_model.predict_noise(x, sigma, model_options, seed)
        return denoised

    def _predict(
        self,
        executor: Any,
        model: Any,
        conds: Sequence[list[int] | None],
        x: torch.Tensor,
        sigma: torch.Tensor,
        model_options: Mapping[str, Any],
    ) -> list[torch.Tensor]:
        """Called by ComfyUI in place of `calc_cond_batch`: a denoised latent for each conditioning, zeros for none."""
        inside = model_options["transformer_options"].get(_REPLACED, {})
        replaced = [(kind, key, patch) for kind, several in inside.items() for key, patch in several.items()]
        asked = [Asked(cond[0], index, replaced) for index, cond in enumerate(conds) if cond is not None]
        sampling = self._sampling
        outputs = self._evaluate.some(sampling.calculate_input(sigma, x), sampling.timestep(sigma).float(), asked)
        denoised = [torch.zeros_like(x) for _ in conds]
        for each, output in zip(asked, outputs, strict=True):
            denoised[each.index] = sampling.calculate_denoised(sigma, output, x)
        return denoised
