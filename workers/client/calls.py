"""Calls of a network, and loops of them: what the ranks hold already goes by its number. A single call of the
transformer is a step where they keep it prepared, else it brings all that prepares it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from parallel_runtime.errors import RequestError
from parallel_runtime.patching.patch_data import WeightPatches
from parallel_runtime.requests.conditioning import CONTROL, Shared
from parallel_runtime.requests.patches import attached_in
from parallel_runtime.requests.requests import ConditioningRef, Forward, Invoke, Step, residual_name
from parallel_runtime.requests.trees import flatten

from .held import Attachments, Conditionings, Mirror, Patches
from .node_requests import LoopRequest, OnProgress, Submission, Submit, check_latent, require_finite

_MOST_PREPARED = 16


class Calls:
    """Knows what the ranks keep for calls, as far as this side can know, and has them get what they lack."""

    def __init__(self, submit: Submit):
        self.patches = Patches(submit)
        self._conditionings = Conditionings()
        self._numbers = itertools.count(1)
        self._prepared: Mirror[int, list[Any]] = Mirror()
        """By what two calls have in common of which one prepares the other."""
        self._attachments = Attachments(submit)
        self._submit = submit

    def run(
        self, model: str, x: torch.Tensor, timestep: torch.Tensor, conditioning: Mapping[str, Any],
        patches: WeightPatches,
    ) -> torch.Tensor:  # fmt: skip
        """The prediction, on x's device; arguments as of `PoolClient.forward`, the model by its name."""
        self.patches.bring(patches)
        check_latent(x)
        # What a ControlNet adds is another in each step, as x is.
        form, residuals = _flat(conditioning.get(CONTROL))
        conditioning = {name: value for name, value in conditioning.items() if name != CONTROL}
        self._attach(conditioning)
        reference, tensors = self._conditionings.refer(conditioning)
        own = {"x": x, "timestep": timestep, **residuals}
        kind = [model, reference.id, patches.names, repr(form), *((each.shape, each.dtype) for each in own.values())]
        number = self._prepared.find(lambda known: known == kind)
        request: Forward | Step
        if number is None:
            number = next(self._numbers)
            self._prepared.hold(number, kind, _MOST_PREPARED)
            kept = tuple(self._conditionings), number, tuple(self._prepared)
            request = Forward(model, reference, *kept, patches.names, form)
        else:
            request = Step(number)
        tensors |= own
        reply = self._submit(Submission(request=request, tensors=tensors, device=x.device))
        return require_finite(reply, "The model's prediction")["output"]

    def sample(self, model: str, loop: LoopRequest, patches: WeightPatches, on_progress: OnProgress) -> torch.Tensor:
        """The latent that a loop ends with, on the CPU."""
        self.patches.bring(patches)
        reply = self._submit(self.of_loop(model, loop, patches, on_progress))
        return require_finite(reply, "The latent")["latent"]

    def of_loop(
        self, model: str, loop: LoopRequest, patches: WeightPatches, on_progress: OnProgress = lambda *_: None
    ) -> Submission:
        """What asks for a loop, with conditionings that the ranks lack; they have its patches."""
        references: list[ConditioningRef] = []
        tensors = dict(loop.tensors)
        try:
            for index, conditioning in loop.branches.items():
                self._attach(conditioning)
                reference, new = self._conditionings.refer(conditioning, index)
                references.append(reference)
                tensors |= new
        except RequestError:
            self.forget()  # branches before the one that does not travel are noted, and never sent
            raise
        kept, branches = tuple(self._conditionings), tuple(references)
        request = msgspec.structs.replace(loop.job, model=model, branches=branches, kept=kept, patches=patches.names)
        return Submission(request=request, tensors=tensors, on_progress=on_progress)

    def invoke(self, model: str, method: str, arguments: Mapping[str, Any], patches: WeightPatches) -> torch.Tensor:
        """What a method of the network gives, on the CPU; see `PoolClient.invoke`."""
        self.patches.bring(patches)
        reference, tensors = self._conditionings.refer(arguments)
        request = Invoke(model, method, reference, tuple(self._conditionings), patches.names)
        return require_finite(self._submit(Submission(request=request, tensors=tensors)), "The latent")["output"]

    def _attach(self, conditioning: Mapping[str, Any]) -> None:
        """Have the ranks know the networks that a conditioning names."""
        arguments = [each.value if isinstance(each, Shared) else each for each in conditioning.values()]
        self._attachments.bring(attached_in(arguments))

    def prepare_anew(self) -> None:
        """The next call of each kind goes through PREPARE again."""
        self._prepared.clear()

    def forget(self) -> None:
        """Trust nothing any more that the ranks may keep, but for patches: those that were brought they have."""
        self._conditionings.clear()
        self.prepare_anew()
        self._attachments.forget()


def _flat(control: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A ControlNet's residuals as plain data and tensors by the names under which they travel, equal ones once."""
    if control is None:
        return None, {}
    tensors: list[torch.Tensor] = []
    try:
        form = flatten(control, tensors)
    except TypeError as error:
        what = "A ControlNet gives {error}, which cannot be sent to the workers."
        raise RequestError(what, "Remove it, or load the model with Load Diffusion Model.", error=error) from error
    return form, {residual_name(place): tensor for place, tensor in enumerate(tensors)}
