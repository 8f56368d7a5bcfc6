"""A call of the network, prepared: the first of its kind, those that repeat it, and calls of other methods."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..denoising.predict import Call, Predictor
from ..errors import RequestError
from ..networks.comfyui.comfy_network import ComfyNetwork
from ..patching.patch_data import WeightPatches
from ..pipefusion.denoise import forward_once
from ..pipefusion.runner import StageRunner
from ..requests.answers import Finished
from ..requests.conditioning import CONTROL, Conditioning
from ..requests.control import Control
from ..requests.requests import INVOKABLE, Forward, Invoke, residual_name
from ..requests.trees import restore
from .prepared import Agreed, Outcome, Prepared, Results, Tensors
from .rank_state import Placed, RankState
from .request_checks import check_place
from .resident import Resident


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
            runner = StageRunner(network, network.mesh.links, [given], x, patches=1, keep=False)
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
    check_place(state, placed, (request.conditioning,), facts, meta, keeps=False)
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


def prepare_invoke(state: RankState, request: Invoke, resident: Resident, meta: Tensors) -> Prepared:
    """A call of another method. Every rank that has the network computes it by itself, as it takes milliseconds."""
    network = resident.network
    if request.method not in INVOKABLE or not isinstance(network, ComfyNetwork | None):
        raise RequestError("The model in the workers has no {method}.", "Report this.", method=request.method)
    state.conditionings.peek(request.arguments, meta)

    def work(tensors: Tensors, control: Control, agreed: Agreed) -> Outcome:
        """Call it; ranks with the network return `output`."""
        (given,) = state.conditionings.take([request.arguments], tensors, request.kept)
        results: Results = {}
        if network is not None:
            resident.activate(patches=state.patches.find(request.patches))
            results["output"] = network.invoke(request.method, given.arguments)
        return Finished(held=state.residency.held()), results

    return Prepared(run_it=work, takes_part=network is not None)
