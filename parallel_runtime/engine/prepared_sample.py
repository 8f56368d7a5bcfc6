"""A whole loop in the pool, prepared: the plan, and the sampler that every rank walks through."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..denoising.denoise import Denoising, Loop
from ..denoising.host_denoise import HostDenoising
from ..denoising.predict import Predictor
from ..errors import RequestError
from ..patching.patch_data import WeightPatches
from ..pipefusion.denoise import PipelineDenoising
from ..planning.limits import check_steps
from ..requests.control import Control
from ..requests.requests import Answer, Sample
from ..said import said
from ..sampling.samplers import SUPPORTED
from .prepared import Prepared, Results
from .rank_state import Placed, RankState, StagedRun
from .request_checks import check_patches, require_memory
from .resident import Resident


@dataclass(kw_only=True)
class PreparedSample(Prepared):
    """See the module."""

    state: RankState
    request: Sample
    placed: Placed
    denoising: Loop
    patches: WeightPatches

    @classmethod
    def prepare(
        cls, state: RankState, request: Sample, resident: Resident, meta: Mapping[str, torch.Tensor]
    ) -> PreparedSample:
        """Validate and plan.

        Raises:
            ParallelError: with cause and fix.
        """
        x = meta["x"]
        denoising = _loop(state, request, resident.dtype)
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
        place, plan = placed.place, placed.plan
        check_steps(plan, steps)
        kept = 0
        if plan.pipe > 1:
            if not isinstance(denoising, Denoising):
                raise RequestError(
                    said("Sampler {name} does not run over stages of a model.", name=repr(request.sampler)),
                    said("Choose one of {able}, or set stages to 1.", able=", ".join(SUPPORTED)),
                )
            denoising.require_noise_of_first_rank()
            if place is not None:
                kept = check_patches(state, request.branches, resident, place, plan.patches, facts, x, meta)
        if place is not None:
            require_memory(resident, place.layout, facts, x.shape[0], kept, state.device, state.rank)
        return cls(
            state=state,
            request=request,
            placed=placed,
            denoising=denoising,
            patches=state.patches.find(request.patches),
            offers=placed.offers(),
            takes_part=place is not None,
        )

    def work(
        self, tensors: Mapping[str, torch.Tensor], control: Control, agreed: Mapping[str, int]
    ) -> tuple[Answer, Results]:
        """Run the loop; the rank that has the finished latent returns `latent`."""
        started = time.perf_counter()
        self.placed.resident.activate(patches=self.patches)
        self.state.watch_memory()
        latent = self._sample(tensors, control, agreed)
        return self.state.finished(self.placed, started), {} if latent is None else {"latent": latent}

    def _sample(
        self, tensors: Mapping[str, torch.Tensor], control: Control, agreed: Mapping[str, int]
    ) -> torch.Tensor | None:
        state, denoising, plan = self.state, self.denoising, self.placed.plan
        branches = state.conditionings.take(self.request.branches, tensors, self.request.kept)
        run = state.join(self.placed, agreed, control)
        if run is None:
            return None
        if isinstance(run, StagedRun):
            assert isinstance(denoising, Denoising)
            seen = denoising.model_inputs(tensors["x"], tensors)[0]
            runner = run.runner(branches, seen, plan.patches, keep=True)
            return PipelineDenoising(denoising, runner, plan.warmup_steps, tensors, control).run()
        predict = Predictor(run.transformer, run.mesh, self.request.joined)
        return denoising.run(predict, branches, tensors, control)


def _loop(state: RankState, request: Sample, dtype: torch.dtype) -> Loop:
    if request.host is None:
        return Denoising(request, dtype, state.unlike)
    return HostDenoising(request, request.host, dtype, state.device, state.unlike)
