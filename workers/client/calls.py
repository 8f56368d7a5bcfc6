"""Single calls of the transformer: as a step where the ranks keep the call prepared, else with all that prepares it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from parallel_runtime.errors import RequestError
from parallel_runtime.requests.conditioning import CONTROL, Shared
from parallel_runtime.requests.patches import attached_in
from parallel_runtime.requests.requests import Forward, PatchNames, Step, residual_name
from parallel_runtime.requests.trees import flatten
from parallel_runtime.said import said

from .attachments import Attachments
from .conditioning_cache import ConditioningCache
from .mirror import Mirror
from .requests import check_filled, no_number, not_finite
from .submission import Callbacks, Reply, Submission


@dataclass(frozen=True)
class Call:
    """Arguments of the transformer.

    Args:
        model: its name in the pool.
        x: (B, C, ...) in the model's dtype, on any device; timestep: (B,) float32.
        conditioning: context (B, T, D) and the family's extras.
        patches: names of the weight patches that the ranks have for it.
    """

    model: str
    x: torch.Tensor
    timestep: torch.Tensor
    conditioning: Mapping[str, Any]
    patches: PatchNames = ("", "")


_MOST_PREPARED = 16


class Calls:
    """Knows which conditionings and calls the ranks keep, as far as this side can know.

    Args:
        submit: runs one request in the pool.
    """

    def __init__(self, submit: Callable[[Submission], Reply]):
        self.cache = ConditioningCache()
        self._numbers = itertools.count(1)
        self._prepared: Mirror[int, Hashable] = Mirror(_MOST_PREPARED)
        """By what two calls have in common of which one prepares the other."""
        self._attachments = Attachments(submit)
        self._submit = submit

    def run(self, call: Call, callbacks: Callbacks) -> torch.Tensor:
        """The prediction, on x's device.

        Raises:
            RequestError: x or the prediction is not finite, x is empty, or an argument is of a kind that does not
                travel.
        """
        check_filled(call.x)
        if not torch.isfinite(call.x).all():
            raise not_finite("latent")
        # What a ControlNet adds is another in each step, as x is.
        conditioning = {name: value for name, value in call.conditioning.items() if name != CONTROL}
        form, residuals = _flat(call.conditioning.get(CONTROL))
        shapes = repr([form, *((each.shape, each.dtype) for each in residuals.values())]) if residuals else ""
        self.attach(conditioning, callbacks)
        reference, tensors, dropped = self.cache.refer(conditioning)
        given = ((each.shape, each.dtype) for each in (call.x, call.timestep))
        kind = (call.model, reference.id, reference.index, *given, call.patches, shapes)
        number = self._prepared.find(lambda known: known == kind)
        request: Forward | Step
        if number is None or dropped:
            if number is not None:
                self._prepared.let_go(number)
            number = next(self._numbers)
            request = Forward(call.model, reference, dropped, number, self._prepared.untold(), call.patches, form)
        else:
            request = Step(number)
        tensors |= {"x": call.x, "timestep": call.timestep, **residuals}
        self._prepared.hold(number, kind)  # first: where the request fails, the ranks are told to forget it
        reply = self._submit(Submission(request=request, tensors=tensors, callbacks=callbacks, device=call.x.device))
        if not reply.finite:  # the last step's would be the picture, with nobody to look at it again
            raise no_number("The model's prediction")
        return reply.tensors["output"]

    def attach(self, conditioning: Mapping[str, Any], callbacks: Callbacks) -> None:
        """Have the ranks know the networks that a conditioning names."""
        self._attachments.bring(attached_in(_arguments(conditioning)), callbacks)

    def prepare_anew(self) -> None:
        """The next call of each kind goes through PREPARE again."""
        self._prepared.forget()

    def forget(self) -> None:
        """Trust nothing any more that the ranks may keep."""
        self.cache.clear()
        self._prepared.doubt()
        self._attachments.forget()


def _flat(control: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A ControlNet's residuals as plain data and tensors by the names under which they travel, equal ones once.

    Raises:
        RequestError: they hold what does not travel.
    """
    if control is None:
        return None, {}
    tensors: list[torch.Tensor] = []
    try:
        form = flatten(control, tensors)
    except TypeError as error:
        raise RequestError(
            said("A ControlNet gives {error}, which cannot be sent to the workers.", error=error),
            "Remove it, or load the model with Load Diffusion Model.",
        ) from error
    return form, {residual_name(place): tensor for place, tensor in enumerate(tensors)}


def _arguments(conditioning: Mapping[str, Any]) -> list[Any]:
    return [each.value if isinstance(each, Shared) else each for each in conditioning.values()]
