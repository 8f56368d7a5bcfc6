"""A whole loop in the pool, prepared: the plan, and the sampler that every rank walks through."""

from __future__ import annotations

import torch

from ..denoising.denoise import Denoising, Loop
from ..denoising.host_denoise import HostDenoising
from ..denoising.predict import Predictor
from ..errors import RequestError
from ..pipefusion.denoise import PipelineDenoising
from ..pipefusion.runner import StageRunner
from ..planning.wish import check_steps
from ..requests.control import Control
from ..requests.requests import Sample
from ..sampling.samplers import SUPPORTED
from .prepared import Agreed, Outcome, Prepared, Tensors
from .rank_state import RankState
from .request_checks import check_place
from .resident import Resident


def prepare_sample(state: RankState, request: Sample, resident: Resident, meta: Tensors) -> Prepared:
    """Validate and plan."""
    x = meta["x"]
    denoising: Loop
    if request.host is None:
        denoising = Denoising(request, resident.dtype, state.unlike)
    else:
        denoising = HostDenoising(request, request.host, resident.dtype, state.device, state.unlike)
    denoising.check(meta, state.device)
    branches = [
        resident.family.check(state.conditionings.peek(branch, meta), given)
        for branch, given in zip(request.branches, denoising.model_inputs(x, meta), strict=True)
    ]
    first = state.conditionings.peek(request.branches[0], meta)
    steps = meta["sigmas"].shape[0] - 1
    shared = x.shape[0] // first.rows_at_once(x.shape[0]) * len(request.branches)
    longest = max(branches, key=lambda seen: seen.text[1])
    # ComfyUI's own samplers see a whole latent: a plan is to have no more stages than the weights have.
    patchwise = steps if request.host is None else 0
    facts = resident.family.describe(longest, batch=1 if first.together else shared, steps=patchwise)
    placed = state.place(resident, facts)
    plan = placed.plan
    check_steps(plan, steps)
    if plan.pipe > 1 and not isinstance(denoising, Denoising):
        what = "Sampler {name} does not run over stages of a model."
        fix = "Choose one of {able}, or set stages to 1."
        raise RequestError(what, fix, name=repr(request.sampler), able=", ".join(SUPPORTED))
    check_place(state, placed, request.branches, facts, meta, keeps=True)
    patches = state.patches.find(request.patches)

    def sample(tensors: Tensors, control: Control, agreed: Agreed) -> torch.Tensor | None:
        branches = state.conditionings.take(request.branches, tensors, request.kept)
        network = state.join(placed, agreed, control)
        if network is None:
            return None
        if network.mesh.links is not None:
            assert isinstance(denoising, Denoising)
            seen = denoising.model_inputs(tensors["x"], tensors)[0]
            runner = StageRunner(network, network.mesh.links, branches, seen, plan.patches, keep=True)
            return PipelineDenoising(denoising, runner, plan.warmup_steps, tensors, control).run()
        predict = Predictor(network, network.mesh, request.joined)
        return denoising.run(predict, branches, tensors, control)

    def work(tensors: Tensors, control: Control, agreed: Agreed) -> Outcome:
        """Run the loop; the rank that has the finished latent returns `latent`."""
        resident.activate(patches=patches)
        latent = sample(tensors, control, agreed)
        return state.finished(placed), {} if latent is None else {"latent": latent}

    return Prepared(run_it=work, offers=placed.offers(), takes_part=placed.place is not None)
