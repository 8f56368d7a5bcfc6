"""Calls of a network, and loops of them: what the ranks hold already goes by its number. A single call of the
transformer is a step where they keep it prepared, else it brings all that prepares it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import msgspec
import torch

from parallel_runtime.errors import RequestError
from parallel_runtime.networks.comfyui.module_tree import describe_module
from parallel_runtime.requests.conditioning import CONTROL, Shared
from parallel_runtime.requests.patches import Attached, attached_in
from parallel_runtime.requests.requests import (
    Attach,
    ConditioningRef,
    Forward,
    Invoke,
    PatchNames,
    Step,
    attached_name,
    residual_name,
)
from parallel_runtime.requests.trees import flatten
from parallel_runtime.said import said

from ..wire.tensors import in_pieces
from .conditioning_cache import ConditioningCache, Mirror
from .requests import LoopRequest, OnProgress, Reply, Submission, check_latent, require_finite

_PIECE = 256 << 20
"""Bytes of tensors in one request."""
_MOST_PREPARED = 16


class Attachments:
    """Keeps the ranks' networks those that somebody here has."""

    def __init__(self, submit: Callable[[Submission], Reply]):
        self._submit = submit
        self._held: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._certain = True  # the ranks have no others than these

    def bring(self, networks: Iterable[Attached]) -> None:
        """Have the ranks know these, and forget those that nobody here has any more."""
        there = {number: module for number, module in self._held.items() if module() is not None}
        if not self._certain or len(there) < len(self._held):
            self._submit(Submission(request=Attach(kept=tuple(there))))
            self._held, self._certain = there, True
        for each in networks:
            if each.number not in self._held:
                self._held[each.number] = weakref.ref(each.module)
                self._send(each)

    def forget(self) -> None:
        """Trust none of them any more."""
        self._certain = self._certain and not self._held
        self._held.clear()

    def _send(self, network: Attached) -> None:
        tensors: list[torch.Tensor] = []
        form: Any = describe_module(network.module, tensors)
        named = {attached_name(place): tensor for place, tensor in enumerate(tensors)}
        for piece in in_pieces(named, _PIECE):
            self._submit(Submission(request=Attach(network.number), tensors=piece))
        self._submit(Submission(request=Attach(network.number, form)))


class Calls:
    """Knows which conditionings and calls the ranks keep, as far as this side can know."""

    def __init__(self, submit: Callable[[Submission], Reply]):
        self._cache = ConditioningCache()
        self._numbers = itertools.count(1)
        self._prepared: Mirror[Hashable] = Mirror(_MOST_PREPARED)
        """By what two calls have in common of which one prepares the other."""
        self._attachments = Attachments(submit)
        self._submit = submit

    def run(
        self, model: str, x: torch.Tensor, timestep: torch.Tensor, conditioning: Mapping[str, Any], patches: PatchNames
    ) -> torch.Tensor:
        """The prediction, on x's device; arguments as of `PoolClient.forward`, model and patches by their names."""
        check_latent(x)
        # What a ControlNet adds is another in each step, as x is.
        form, residuals = _flat(conditioning.get(CONTROL))
        conditioning = {name: value for name, value in conditioning.items() if name != CONTROL}
        shapes = repr([form, *((each.shape, each.dtype) for each in residuals.values())]) if residuals else ""
        self._attach(conditioning)
        reference, tensors = self._cache.refer(conditioning)
        given = ((each.shape, each.dtype) for each in (x, timestep))
        kind = (model, reference.id, reference.index, *given, patches, shapes)
        number = self._prepared.find(lambda known: known == kind)
        request: Forward | Step
        if number is None:
            number = next(self._numbers)
            self._prepared.hold(number, kind)
            kept = self._cache.numbers, number, self._prepared.numbers
            request = Forward(model, reference, *kept, patches, form)
        else:
            request = Step(number)
        tensors |= {"x": x, "timestep": timestep, **residuals}
        reply = self._submit(Submission(request=request, tensors=tensors, device=x.device))
        return require_finite(reply, "The model's prediction")["output"]

    def sample(self, model: str, loop: LoopRequest, patches: PatchNames, on_progress: OnProgress) -> torch.Tensor:
        """The latent that a loop ends with, on the CPU."""
        for branch in loop.branches:
            self._attach(branch.conditioning)
        references: list[ConditioningRef] = []
        tensors = dict(loop.tensors)
        try:
            for branch in loop.branches:
                reference, new = self._cache.refer(branch.conditioning, branch.index)
                references.append(reference)
                tensors |= new
        except RequestError:
            self.forget()  # branches before the one that does not travel are noted, and never sent
            raise
        named = {"model": model, "branches": tuple(references), "kept": self._cache.numbers, "patches": patches}
        request = msgspec.structs.replace(loop.job, **named)
        reply = self._submit(Submission(request=request, tensors=tensors, on_progress=on_progress))
        return require_finite(reply, "The latent")["latent"]

    def invoke(self, model: str, method: str, arguments: Mapping[str, Any], patches: PatchNames) -> torch.Tensor:
        """What a method of the network gives, on the CPU; see `PoolClient.invoke`."""
        reference, tensors = self._cache.refer(arguments)
        request = Invoke(model, method, reference, self._cache.numbers, patches)
        return require_finite(self._submit(Submission(request=request, tensors=tensors)), "The latent")["output"]

    def _attach(self, conditioning: Mapping[str, Any]) -> None:
        """Have the ranks know the networks that a conditioning names."""
        arguments = [each.value if isinstance(each, Shared) else each for each in conditioning.values()]
        self._attachments.bring(attached_in(arguments))

    def prepare_anew(self) -> None:
        """The next call of each kind goes through PREPARE again."""
        self._prepared.clear()

    def forget(self) -> None:
        """Trust nothing any more that the ranks may keep."""
        self._cache.clear()
        self._prepared.clear()
        self._attachments.forget()


def _flat(control: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A ControlNet's residuals as plain data and tensors by the names under which they travel, equal ones once."""
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
