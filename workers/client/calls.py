"""Single calls of the transformer: as a step where the ranks keep the call prepared, else with all that prepares it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from parallel_runtime.errors import RequestError
from parallel_runtime.requests.conditioning import CONTROL, Shared
from parallel_runtime.requests.patches import attached_in
from parallel_runtime.requests.requests import Forward, PatchNames, Step, residual_name
from parallel_runtime.requests.trees import flatten
from parallel_runtime.said import said

from ..wire.shared_memory import Scalar
from .attachments import Attachments
from .conditioning_cache import ConditioningCache, Guess
from .prepared_calls import PreparedCalls, kind_of
from .requests import check_filled, no_number, not_finite
from .step_trace import StepTrace
from .submission import Callbacks, Meanwhile, Reply, Submission, rest

log = logging.getLogger("parallel_dit")


class Unlike(Exception):
    """The conditioning is not the one that was guessed; nothing was sent."""


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


class Calls:
    """Knows which conditionings and calls the ranks keep, as far as this side can know.

    Args:
        submit: runs one request in the pool.
    """

    def __init__(self, submit: Callable[[Submission], Reply]):
        self.cache = ConditioningCache()
        self._prepared = PreparedCalls()
        self._attachments = Attachments(submit)
        self._submit = submit
        self._trace = StepTrace()

    def run(self, call: Call, callbacks: Callbacks, meanwhile: Meanwhile = rest) -> torch.Tensor:
        """The prediction, on x's device.

        Args:
            meanwhile: see `Submission`.

        Raises:
            RequestError: x or the prediction is not finite, x is empty, or an argument is of a kind that does not
                travel.
        """
        check_filled(call.x)
        called = time.perf_counter()
        # What a ControlNet adds is another in each step, as x is.
        conditioning = {name: value for name, value in call.conditioning.items() if name != CONTROL}
        form, residuals = _flat(call.conditioning.get(CONTROL))
        given = {"x": call.x, "timestep": call.timestep, **residuals}
        shapes = repr([form, *((each.shape, each.dtype) for each in residuals.values())]) if residuals else ""
        # The request is put in below: a step first, or what prepares one.
        submission = Submission(
            request=Step(0), tensors=given, callbacks=callbacks, device=call.x.device, meanwhile=meanwhile
        )
        guess = self.cache.guess(conditioning)
        if guess is not None:
            kind = kind_of(call.model, guess.reference, call.x, call.timestep), call.patches, shapes
            number = self._prepared.find(kind)
            if number:
                submission = _vetted(replace(submission, request=Step(number)), call.x, guess)
                referred = time.perf_counter()
                try:
                    reply = self._submit(submission)
                except Unlike:
                    guess.settle(False)
                else:
                    guess.settle(True)
                    if summary := self._trace.add((called, referred, *reply.stamps, time.perf_counter())):
                        log.info("Parallel DiT: %s", summary)
                    return _prediction(reply)
        self._attachments.bring(attached_in(_arguments(conditioning)), callbacks)
        reference, tensors, dropped = self.cache.refer(conditioning)
        kind = (kind_of(call.model, reference, call.x, call.timestep), call.patches, shapes)
        number = self._prepared.find(kind)
        request: Forward | Step = Step(number)
        if not number or dropped:
            number = self._prepared.next_number()
            request = Forward(call.model, reference, dropped, number, self._prepared.dropped(), call.patches, form)
        bounds = torch.aminmax(call.x)
        tensors |= given
        reply = self._submit(
            replace(submission, request=request, tensors=tensors, scalars=bounds, vet=_vet, meanwhile=meanwhile)
        )
        self._prepared.keep(kind, number)
        return _prediction(reply)

    def prepare_anew(self) -> None:
        """The next call of each kind goes through PREPARE again."""
        self._prepared.clear()

    def forget(self) -> None:
        """Trust nothing any more that the ranks may keep."""
        self.cache.clear()
        self._prepared.clear()
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
            said("A ControlNet gives {error}, which cannot be sent to the pool.", error=error),
            "Remove it, or load the model with Load Diffusion Model.",
        ) from error
    return form, {residual_name(place): tensor for place, tensor in enumerate(tensors)}


def _vetted(step: Submission, x: torch.Tensor, guess: Guess) -> Submission:
    """The step with what is to be found out of it: before it is sent, together with the copy of its tensors, or while
    the ranks compute, where that is likely to be well.

    Then what little a GPU has to do for it is launched before the ranks have woken up.
    """

    def find() -> tuple[torch.Tensor, ...]:
        return (*torch.aminmax(x), *guess.unlike())

    def find_meanwhile() -> None:
        found = find()
        step.meanwhile()
        _vet([each.item() for each in found])

    if guess.trusted:
        return replace(step, meanwhile=find_meanwhile)
    return replace(step, scalars=find(), vet=_vet)


def _prediction(reply: Reply) -> torch.Tensor:
    """What the network gave, if it is numbers: the last step's would be the picture, with nobody to look at it again.

    Raises:
        RequestError: it is not.
    """
    if not reply.finite:
        raise no_number("The model's prediction")
    return reply.tensors["output"]


def _arguments(conditioning: Mapping[str, Any]) -> list[Any]:
    return [each.value if isinstance(each, Shared) else each for each in conditioning.values()]


def _vet(scalars: Sequence[Scalar]) -> None:
    """Stop a call by x's least and largest value, and by whether its conditioning is not what was guessed."""
    least, largest, *unlike = scalars
    if not (math.isfinite(least) and math.isfinite(largest)):  # as NaN is either
        raise not_finite("latent")
    if any(unlike):
        raise Unlike
