"""Runs of the network, prepared: a call, the first of its kind and those that repeat it; a whole loop, its plan and the
sampler that every rank walks through; calls of other methods. What they are refused for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .. import memory
from ..config import STREAMED
from ..denoising.denoise import Denoising, Loop
from ..denoising.host_denoise import HostDenoising
from ..denoising.predict import Call, Predictor
from ..errors import RequestError
from ..networks.comfyui.comfy_network import ComfyNetwork
from ..patching.patch_data import WeightPatches
from ..pipefusion.denoise import PipelineDenoising, forward_once
from ..pipefusion.runner import StageRunner
from ..planning.cut import kept_bytes
from ..planning.wish import check_steps
from ..requests.conditioning import CONTROL, OPTIONS, Conditioning
from ..requests.control import Control
from ..requests.facts import GIB, RequestFacts
from ..requests.patches import CARRIED
from ..requests.requests import INVOKABLE, Finished, Forward, Invoke, Sample, residual_name
from ..requests.trees import restore
from ..said import said, together
from ..sampling.samplers import SUPPORTED
from .rank_state import Agreed, Outcome, Placed, Prepared, RankState, Results, Tensors
from .residency import Resident

_CERTAIN_ACTIVATIONS = 6
"""Activations of a token that are alive at once whatever is fused: a block's input, its norm, queries, keys, values
and what attention makes of them. FLUX.1 on H200s was measured to need 9.6 at 2048 × 2048 and 12 at 1024 × 1024."""

_LIKELY = 2  # times that much is made free where it only costs that other models leave the device
_UNKNOWN = 4 * GIB  # made free for activations that are not estimated


def _repeated(
    state: RankState, placed: Placed, conditioning: Conditioning, patches: WeightPatches, residuals: Any
) -> Prepared:
    """One call of the transformer. All that is there to run it was prepared, so any step may run it again."""
    told = False  # the client knows the details of the plan

    def work(tensors: Tensors, control: Control, agreed: Agreed) -> Outcome:
        """Predict for `x` and `timestep`; the rank that has the answer returns `output`."""
        nonlocal told
        # Models that were prepared since may have taken its place, or other patches that of its own.
        placed.resident.activate(patches=patches)
        x, timestep = tensors["x"], tensors["timestep"]
        given = conditioning
        if residuals is not None:  # the form of what a ControlNet gives in each step
            count = sum(name.startswith(residual_name("")) for name in tensors)
            control_tensors = restore(residuals, [tensors[residual_name(place)] for place in range(count)])
            given = replace(conditioning, arguments={**conditioning.arguments, CONTROL: control_tensors})
        output = None
        network = state.join(placed, agreed, control)
        if network is not None and network.mesh.links is not None:
            runner = StageRunner(network, [given], x, patches=1, keep=False)
            output = forward_once(runner, x, timestep)
        elif network is not None:
            output = Predictor(network, network.mesh, tried=told)([Call(x, timestep, given)])[0]
        answer = state.finished(placed, repeated=told)
        told = True
        return answer, {} if output is None else {"output": output}

    return Prepared(run_it=work, takes_part=placed.place is not None, names=conditioning.names)


def prepare_forward(state: RankState, request: Forward, resident: Resident, meta: Tensors) -> Prepared:
    """A call with its conditioning, which leaves behind what those run that repeat it."""
    x = meta["x"]
    given = state.conditionings.peek(request.conditioning, meta)
    seen = resident.family.check(given, x)
    shared = 1 if given.together else x.shape[0] // given.rows_at_once(x.shape[0])
    facts = resident.family.describe(seen, batch=shared)
    placed = state.place(resident, facts)
    _check_place(state, placed, [given], facts, x.shape[0], keeps=False)
    patches = state.patches.find(request.patches)

    def work(tensors: Tensors, control: Control, agreed: Agreed) -> Outcome:
        """Take the conditioning in, keep the call where the client asks for it, and run it."""
        state.calls = {kind: call for kind, call in state.calls.items() if kind in request.kept_kinds}
        (conditioning,) = state.conditionings.take([request.conditioning], tensors, request.kept)
        repeated = _repeated(state, placed, conditioning, patches, request.residuals)
        if request.kind:
            state.calls[request.kind] = repeated
        return repeated.run_it(tensors, control, agreed)

    return Prepared(run_it=work, offers=placed.offers(), takes_part=placed.place is not None)


def prepare_sample(state: RankState, request: Sample, resident: Resident, meta: Tensors) -> Prepared:
    """A loop: its plan, and the sampler that every rank walks through."""
    denoising: Loop
    if request.host is None:
        denoising = Denoising(request, resident.dtype, state.unlike)
    else:
        denoising = HostDenoising(request, request.host, resident.dtype, state.device, state.unlike)
    denoising.check(meta)
    placed = _place_loop(state, denoising, resident, meta)
    patches = state.patches.find(request.patches)

    def work(tensors: Tensors, control: Control, agreed: Agreed) -> Outcome:
        """Run the loop; the rank that has the finished latent returns `latent`."""
        resident.activate(patches=patches)
        branches = state.conditionings.take(request.branches, tensors, request.kept)
        network, latent = state.join(placed, agreed, control), None
        if network is not None and network.mesh.links is not None:
            assert isinstance(denoising, Denoising)
            seen = denoising.model_inputs(tensors["x"], tensors)[0]
            runner = StageRunner(network, branches, seen, placed.plan.patches, keep=True)
            latent = PipelineDenoising(denoising, runner, placed.plan.warmup_steps, tensors, control).run()
        elif network is not None:
            latent = denoising.run(Predictor(network, network.mesh, request.joined), branches, tensors, control)
        return state.finished(placed), {} if latent is None else {"latent": latent}

    return Prepared(run_it=work, offers=placed.offers(), takes_part=placed.place is not None)


def _place_loop(state: RankState, denoising: Loop, resident: Resident, meta: Tensors) -> Placed:
    """Plan a loop; refuse what this rank, or any, cannot run."""
    request, x, steps = denoising.request, meta["x"], meta["sigmas"].shape[0] - 1
    given = [state.conditionings.peek(branch, meta) for branch in request.branches]
    inputs = denoising.model_inputs(x, meta)
    branches = [resident.family.check(each, seen) for each, seen in zip(given, inputs, strict=True)]
    shared = x.shape[0] // given[0].rows_at_once(x.shape[0]) * len(request.branches)
    longest = max(branches, key=lambda seen: seen.text[1])
    # ComfyUI's own samplers see a whole latent: a plan is to have no more stages than the weights have.
    patchwise = steps if request.host is None else 0
    facts = resident.family.describe(longest, batch=1 if given[0].together else shared, steps=patchwise)
    placed = state.place(resident, facts)
    check_steps(placed.plan, steps)
    if placed.plan.pipe > 1 and not isinstance(denoising, Denoising):
        what = "Sampler {name} does not run over stages of a model."
        fix = "Choose one of {able}, or set stages to 1."
        raise RequestError(what, fix, name=repr(request.sampler), able=", ".join(SUPPORTED))
    _check_place(state, placed, given, facts, x.shape[0], keeps=True)
    return placed


def prepare_invoke(state: RankState, request: Invoke, resident: Resident, meta: Tensors) -> Prepared:
    """A call of another method. Every rank that has the network computes it by itself, as it takes milliseconds."""
    network = resident.network
    if request.method not in INVOKABLE or not isinstance(network, ComfyNetwork | None):
        raise RequestError("The model in the workers has no {method}.", "Report this.", method=request.method)
    state.conditionings.peek(request.arguments, meta)

    def work(tensors: Tensors, control: Control, agreed: Agreed) -> Outcome:
        (given,) = state.conditionings.take([request.arguments], tensors, request.kept)
        results: Results = {}
        if network is not None:
            resident.activate(patches=state.patches.find(request.patches))
            results["output"] = network.invoke(request.method, given.arguments)
        return Finished(held=state.residency.held()), results

    return Prepared(run_it=work, takes_part=network is not None)


def _check_place(
    state: RankState, placed: Placed, given: Sequence[Conditioning], facts: RequestFacts, items: int, keeps: bool
) -> None:
    """Refuse what this rank, perhaps alone, cannot run at its place: inputs that act inside of stages, and
    (OutOfMemoryError, with the sizes and what to change) least activations that are more than is free when other models
    have left, with keys and values where stages keep them. What might do is not refused: `explain` warns of it. `items`
    are those of the latent, without CFG branches: forwards are of no fewer, where the rank has them."""
    place, resident, kept = placed.place, placed.resident, 0
    model = resident.loaded_model
    if place is None or model is None:
        return
    plan, tokens = place.plan, facts.tokens + facts.text_tokens
    if plan.pipe > 1:
        if any(each.arguments.get(OPTIONS, {}).get(CARRIED) for each in given):
            raise RequestError("A node's function acts inside of the network, which stages cannot.", "Set stages to 1.")
        if keeps and (owned := resident.owned(place)) is not None:
            kept = kept_bytes(resident.facts, owned, -(-facts.batch // plan.batch) * tokens)
    if not resident.facts.splits_sequence:
        resident.store.prepare_run(model, _UNKNOWN)
        return  # a U-Net: tokens and width differ from level to level
    share = place.speeds[place.sequence_index] / sum(place.speeds) if place.speeds else 1 / plan.sequence
    rows = min(items, facts.batch // plan.batch)
    width = resident.facts.width * resident.facts.bytes_per_number
    activations = int(_CERTAIN_ACTIVATIONS * rows * tokens * share * width)
    resident.store.prepare_run(model, kept + _LIKELY * activations)
    template = "A batch of {batch} × {tokens} tokens" if facts.batch > 1 else "A picture of {tokens} tokens"
    what = said(template, batch=facts.batch, tokens=tokens)
    parts = [said("activations of at least {size} GiB", size=f"{activations / GIB:.1f}")]
    way = "Use a smaller picture or batch, set ulysses to more GPUs, or free memory on that device."
    if kept:
        parts.insert(0, said("PipeFusion's keys and values of {size} GiB", size=f"{kept / GIB:.1f}"))
        way = "Use a smaller picture or batch, set ulysses or stages to more GPUs, or free memory on that device."
    ways = [said(way)]
    if plan.pipe == 1 and resident.wish.config.weights not in STREAMED and resident.facts.blocks > 1:
        ways.append(said("Set weights in Parallel Config to spread or host: then the weights take less of it."))
    what = said("{what}, with {parts},", what=what, parts=together(parts, " and "))
    given_back = resident.kept_bytes()
    # The reserve was held back when the weights were loaded.
    memory.require(kept + activations, state.device, state.rank, what, ways, given_back, reserve=0)
