"""A call of the network, prepared: the first of its kind, those that repeat it, and calls of other methods."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Any

from ..denoising.predict import Call, Predictor
from ..errors import RequestError
from ..networks.comfyui.comfy_network import ComfyNetwork
from ..patching.patch_data import WeightPatches
from ..pipefusion.denoise import forward_once
from ..pipefusion.runner import StageRunner
from ..requests.conditioning import CONTROL, Conditioning
from ..requests.control import Control
from ..requests.requests import INVOKABLE, Forward, Invoke, residual_name
from ..requests.trees import restore
from ..said import said
from .prepared import Agreed, Outcome, Prepared, Results, Tensors
from .rank_state import Placed, RankState
from .request_checks import check_stages, require_memory
from .resident import Resident


def _with_residuals(conditioning: Conditioning, form: Any, tensors: Tensors) -> Conditioning:
    """The conditioning with a ControlNet's residuals of this step."""
    if form is None:
        return conditioning
    count = sum(name.startswith(residual_name("")) for name in tensors)
    residuals = restore(form, [tensors[residual_name(place)] for place in range(count)])
    return replace(conditioning, arguments={**conditioning.arguments, CONTROL: residuals})


@dataclass(kw_only=True)
class RepeatedForward(Prepared):
    """One call of the transformer. All that is there to run it was prepared, so any step may run it again."""

    state: RankState
    placed: Placed
    conditioning: Conditioning
    patches: WeightPatches
    residuals: Any = None
    told: bool = False
    """The client knows the details of the plan."""

    def names(self, networks: Set[int]) -> bool:
        """Whether its conditioning has one of these networks."""
        return self.conditioning.names(networks)

    def work(self, tensors: Tensors, control: Control, agreed: Agreed) -> Outcome:
        """Predict for `x` and `timestep`; the rank that has the answer returns `output`."""
        state, placed, resident = self.state, self.placed, self.placed.resident
        # Models that were prepared since may have taken its place, or other patches that of its own.
        resident.activate(patches=self.patches)
        x, timestep = tensors["x"], tensors["timestep"]
        conditioning = _with_residuals(self.conditioning, self.residuals, tensors)
        results: Results = {}
        network = state.join(placed, agreed, control)
        links = None if network is None else network.mesh.links
        if network is not None and links is not None:
            runner = StageRunner(network, network.mesh, links, [conditioning], x, patches=1, keep=False)
            output = forward_once(runner, x, timestep)
            results = {} if output is None else {"output": output}
        elif network is not None:
            predict = Predictor(network, network.mesh, tried=self.told)
            results["output"] = predict([Call(x, timestep, conditioning)])[0]
        answer = state.finished(placed, repeated=self.told)
        self.told = True
        return answer, results


def prepare_forward(state: RankState, request: Forward, resident: Resident, meta: Tensors) -> Prepared:
    """A call with its conditioning; what it leaves behind for those that repeat it is a `RepeatedForward`.

    Raises:
        ParallelError: with cause and fix.
    """
    x = meta["x"]
    given = state.conditionings.peek(request.conditioning, meta)
    seen = resident.family.check(given, x)
    shared = 1 if given.together else x.shape[0] // given.rows_at_once(x.shape[0])
    facts = resident.family.describe(seen, batch=shared)
    placed = state.place(resident, facts)
    here = placed.place is not None
    if placed.place is not None:
        if placed.plan.pipe > 1:
            check_stages(state, (request.conditioning,), resident, placed.place, facts, meta)
        require_memory(resident, placed.place, facts, x.shape[0], 0, state.device, state.rank)
    patches = state.patches.find(request.patches)

    def work(tensors: Tensors, control: Control, agreed: Agreed) -> Outcome:
        """Take the conditioning in, keep the call where the client asks for it, and run it."""
        state.calls = {kind: call for kind, call in state.calls.items() if kind in request.kept_kinds}
        (conditioning,) = state.conditionings.take([request.conditioning], tensors, request.kept)
        repeated = RepeatedForward(
            state=state, placed=placed, conditioning=conditioning, patches=patches, residuals=request.residuals,
            takes_part=here,
        )  # fmt: skip
        if request.kind:
            state.calls[request.kind] = repeated
        return repeated.work(tensors, control, agreed)

    return Prepared(run_it=work, offers=placed.offers(), takes_part=here)


def prepare_invoke(state: RankState, request: Invoke, resident: Resident, meta: Tensors) -> Prepared:
    """A call of another method. Every rank that has the network computes it by itself, as it takes milliseconds.

    Raises:
        RequestError: no network of ComfyUI's, or no method that may be called.
    """
    network = resident.network
    owns = network is None or isinstance(network, ComfyNetwork)
    if request.method not in INVOKABLE or not owns:
        raise RequestError(said("The model in the workers has no {method}.", method=request.method), "Report this.")
    state.conditionings.peek(request.arguments, meta)

    def work(tensors: Tensors, control: Control, agreed: Agreed) -> Outcome:
        """Call it; ranks with the network return `output`."""
        (given,) = state.conditionings.take([request.arguments], tensors, request.kept)
        results: Results = {}
        if isinstance(network, ComfyNetwork):
            resident.activate(patches=state.patches.find(request.patches))
            results["output"] = network.invoke(request.method, given.arguments)
        return state.finished(None), results

    return Prepared(run_it=work, takes_part=isinstance(network, ComfyNetwork))
