"""The denoising loop of one `Sample` request, run alike on every rank of the mesh.

What it reads beside latent and conditionings, a parameter of the request asks for, never what happens to have come
along: what is asked for is used or refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import RequestError
from ..mesh.agreement import of_first_rank
from ..requests.conditioning import Conditioning
from ..requests.control import Cancelled, Control
from ..requests.requests import Sample, concat_name, share_name
from ..sampling.denoiser import PREDICTIONS, Denoiser, Inpaint, Predict, check_guidance
from ..sampling.own_timesteps import FIRST, OwnTimestep
from ..sampling.samplers import SAMPLERS, run_steps
from .predict import Call, Predictor

Tensors = Mapping[str, Tensor]
INPAINT = ("mask", "latent_image", "noise")  # tensors of a noise mask
Told = Callable[[int, Tensor], None]
"""(index of a step, its denoised latent), once a step; what it raises ends the run, on all ranks."""


@dataclass(frozen=True)
class Evaluation:
    """Called with (latent, timestep) for all branches in the request's order; see `sampling.denoiser.Predict`."""

    loop: Loop
    predictor: Predictor
    branches: Sequence[Conditioning]
    tensors: Tensors

    def __call__(self, x: Tensor, timestep: Tensor) -> list[Tensor]:
        return self.some(x, timestep, list(enumerate(self.branches)))

    def some(self, x: Tensor, timestep: Tensor, branches: Sequence[tuple[int, Conditioning]]) -> list[Tensor]:
        """An output for each of these: a branch's place in the request, and what the transformer is told of it."""
        inputs, calls = self.loop.model_inputs(self.agreed(x), self.tensors), []
        own_timesteps = self.loop.own_timesteps(self.tensors)
        for place, conditioning in branches:
            made = {name: own.at(timestep) for name, own in own_timesteps[place].items()}
            first = made.pop(FIRST, timestep)
            if made:
                conditioning = Conditioning({**conditioning.arguments, **made}, conditioning.shared)
            calls.append(Call(inputs[place], first, conditioning))
        return [output.float() for output in self.predictor(calls)]

    def agreed(self, tensor: Tensor) -> Tensor:
        """The same bytes on all ranks: the first one's."""
        return of_first_rank(tensor, self.predictor.mesh) if self.loop.unlike else tensor


class Loop:
    """A loop of a request, whoever steps: what it evaluates, whom it tells. `dtype` is the transformer's; the latent
    stays float32, as in ComfyUI. `unlike`: devices are of several kinds; alike on all ranks, as collectives follow."""

    def __init__(self, request: Sample, dtype: torch.dtype, unlike: bool = False):
        self.request, self.dtype, self.unlike = request, dtype, unlike

    def check(self, tensors: Tensors) -> None:
        """Refuse what would fail in the loop, by shapes of meta tensors: RequestError that names what misfits."""
        request = self.request
        channels = [concat_name(branch.index) for branch in request.branches] if request.concat else []
        shares = [share_name(index, name) for index, name, _ in request.own_timesteps]
        names = ["sigmas", "timesteps", *(INPAINT if request.inpaint else ()), *channels, *shares]
        if missing := [name for name in names if name not in tensors]:
            text = "The request asks for {missing}, which did not come with it."
            raise RequestError(text, "Report this.", missing=", ".join(missing))
        x = tensors["x"].shape
        sigmas, timesteps = tensors["sigmas"].shape, tensors["timesteps"].shape
        if sigmas != timesteps or len(sigmas) != 1 or sigmas[0] < 2:
            raise _unfit("steps", [sigmas, timesteps], x)
        inpaint = [tensors[name].shape for name in INPAINT] if request.inpaint else []
        if any(shape != x for shape in inpaint):
            raise _unfit("a noise mask", inpaint, x)
        for shape in (fixed.shape for fixed in self._fixed_channels(tensors)):
            if (*shape[:1], *shape[2:]) != (*x[:1], *x[2:]):
                raise _unfit("fixed channels", [shape], x)
        for share in (own.share for named in self.own_timesteps(tensors) for own in named.values()):
            if share.shape[:1] != x[:1]:
                raise _unfit("own timesteps", [share.shape], x)

    def run(self, predictor: Predictor, branches: Sequence[Conditioning], tensors: Tensors, control: Control) -> Tensor:
        """Return the finished latent (B, C, ...) float32; Cancelled on all ranks before the same step. Every rank holds
        the whole latent and takes every step itself, from predictions that are the same bytes on all ranks: so the
        latents stay equal without being exchanged. Unlike devices draw other noise, and may round otherwise: there the
        transformer sees the first rank's latent at every evaluation, and the first rank's is what counts at the end."""
        total = len(tensors["sigmas"]) - 1

        def on_step(index: int, denoised: Tensor) -> None:
            # Nodes with an output for the denoised latent want the last one, previews or not.
            control.progress(index, total, denoised if self.request.preview or index == total - 1 else None)
            if control.all_stop(predictor.mesh.members):
                raise Cancelled

        return self._steps(Evaluation(self, predictor, branches, tensors), tensors, on_step)

    def model_inputs(self, x: Tensor, tensors: Tensors) -> list[Tensor]:
        """One input of the transformer per CFG branch, in its dtype: x, and the branch's fixed channels after it."""
        seen = x.to(self.dtype)
        fixed = [torch.cat([seen, channels.to(seen)], dim=1) for channels in self._fixed_channels(tensors)]
        return fixed or [seen] * len(self.request.branches)

    def inpaint(self, tensors: Tensors) -> Inpaint | None:
        """The noise mask, if there is one."""
        if not self.request.inpaint:
            return None
        mask, latent_image, noise = (tensors[name] for name in INPAINT)
        return Inpaint(mask, latent_image, noise, self.request.inpaint_clean)

    def _fixed_channels(self, tensors: Tensors) -> list[Tensor]:
        branches = self.request.branches if self.request.concat else ()
        return [tensors[concat_name(branch.index)] for branch in branches]

    def own_timesteps(self, tensors: Tensors) -> list[dict[str, OwnTimestep]]:
        """By name for each branch; empty where all is told the loop's own."""
        found: dict[int, dict[str, OwnTimestep]] = {branch.index: {} for branch in self.request.branches}
        for index, name, begin in self.request.own_timesteps:
            found[index][name] = OwnTimestep(tensors[share_name(index, name)], begin)
        return list(found.values())

    def _steps(self, evaluate: Evaluation, tensors: Tensors, on_step: Told) -> Tensor:
        """Take all steps."""
        raise NotImplementedError


class Denoising(Loop):
    """A loop of our own samplers. Arguments as of `Loop`; branches that guidance cannot combine are refused."""

    def __init__(self, request: Sample, dtype: torch.dtype, unlike: bool = False):
        super().__init__(request, dtype, unlike)
        if [branch.index for branch in request.branches] not in ([0], [0, 1]):
            text = "Sampling in the workers takes a positive and at most one negative conditioning."
            raise RequestError(text, "Use KSampler for this graph.")
        check_guidance(len(request.branches), request.cfg)
        for name, known in ((request.sampler, SAMPLERS), (request.prediction, PREDICTIONS)):
            if name not in known:
                text = "The workers do not know {name}; they know {known}."
                fix = "Use KSampler: it runs every model per step."
                raise RequestError(text, fix, name=repr(name), known=", ".join(known))
        self.sampler = SAMPLERS[request.sampler]
        self.prediction = PREDICTIONS[request.prediction]

    def _steps(self, evaluate: Evaluation, tensors: Tensors, on_step: Told) -> Tensor:
        denoiser, sigmas = self.denoiser(evaluate, tensors), tensors["sigmas"]
        return run_steps(self.sampler, denoiser, tensors["x"], sigmas, lambda step, latent: on_step(step.index, latent))

    def denoiser(self, predict: Predict, tensors: Tensors) -> Denoiser:
        """What the sampler's evaluations go through."""
        return Denoiser(predict, self.prediction, tensors["timesteps"], self.request.cfg, self.inpaint(tensors))


def _unfit(what: str, shapes: Sequence[torch.Size], latent: torch.Size) -> RequestError:
    text = "The request asks for {name} of shape {map} on a latent of {latent}."
    fix = "Make all of them from one latent and one list of sigmas."
    given = ", ".join(str(tuple(shape)) for shape in shapes)
    return RequestError(text, fix, name=what, map=given, latent=tuple(latent))
