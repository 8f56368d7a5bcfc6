"""A run of a VAE, prepared: what comes to it is looked at, and it is loaded where it is not there."""

from __future__ import annotations

from functools import partial

import torch

from ..acceleration.channels_last import usable
from ..config import ParallelPlan
from ..errors import RequestError
from ..loading.reading import ignore
from ..mesh.agreement import agreed_history, offer_history, offer_same
from ..mesh.mesh import Mesh
from ..requests.control import Cancelled, Control, StopVotes
from ..requests.requests import Finished, RunVae
from ..said import said
from ..vae.families import can_be_recorded
from ..vae.shared_vae import run_half, shared_ranks
from ..vae.vae_weights import VaeWeights
from .rank_state import Agreed, Outcome, Prepared, RankState, Tensors, require_same

_DIMS = (3, 4, 5)  # of sound, pictures, videos
_SAME = "vae"
_TRIED = "vae tried"
_FUSED = "vae fused"
_RECORDED = "vae recorded"
_SPARE = 2  # a run is recorded, whose memory stays taken, where so many times its memory is free on every rank


def prepare_vae(state: RankState, request: RunVae, meta: Tensors, control: Control) -> Prepared:
    """Encode or decode: look at the tensor, have the VAE, and memory for it."""
    shape = tuple(meta["x"].shape)
    if len(shape) not in _DIMS or not meta["x"].numel():
        text = "A VAE cannot take a tensor of the shape {shape}."
        raise RequestError(text, "Check the node that gives the latent or the picture.", shape=shape)
    if request.half not in ("encoder", "decoder"):
        raise RequestError("A VAE has no {half}.", "Report this.", half=request.half)
    part = _Part(state, request, shape, control) if state.rank < request.ranks else None

    def work(tensors: Tensors, control: Control, agreed: Agreed) -> Outcome:
        """Run it; the first rank returns `output`."""
        require_same(_SAME, agreed, request.file.path)
        mesh = state.meshes.join(ParallelPlan(ulysses=request.ranks))
        output = None
        if mesh is not None and part is not None and part.works:
            output = part.run(mesh, tensors["x"], control, agreed)
        encodes = request.half == "encoder"
        what = "Encoded; devices at work: {count}." if encodes else "Decoded; devices at work: {count}."
        answer = Finished(said(what, count=1 if part is None else part.ranks), held=state.residency.held())
        return answer, {} if output is None else {"output": output}

    takes_part = part is not None and part.works
    return Prepared(run_it=work, offers={} if part is None else part.offers(), takes_part=takes_part)


class _Part:
    """What a rank of those that the request names has of a run: the VAE, and memory where the rank `works`."""

    def __init__(self, state: RankState, request: RunVae, shape: tuple[int, ...], control: Control):
        self._state, self._request, self._kind = state, request, f"{request.half} {shape}"
        self._held = state.residency.load_vae(request, control)
        assert isinstance(self._held.weights, VaeWeights)
        self._weights = weights = self._held.weights
        self._unit = 1 if request.half == "decoder" else weights.reader.unit
        self.ranks = shared_ranks(weights.network, request.half, shape, self._unit, request.ranks)
        self.works = state.rank < self.ranks
        if self.works:
            state.residency.store.prepare_run(self._held, request.memory // self.ranks, control.loading)

    def offers(self) -> dict[str, int]:
        """What the ranks must have alike, or do alike."""
        weights, ranks, device = self._weights, tuple(range(self.ranks)), self._state.device
        records = self.works and can_be_recorded(weights.network, self._request.half, device)
        records &= not self._request.options and weights.tried.get(self._kind, False)
        if records and not weights.recorded.has(ranks, self._kind):
            # What other recordings hold counts as free elsewhere, and is not.
            records = torch.cuda.mem_get_info(device)[0] >= _SPARE * (self._request.memory // self.ranks)
        offers = offer_same(_SAME, (type(weights.network).__name__, weights.reader.unit, self.ranks))
        offers |= offer_history(ranks, weights.recorded.history(ranks))
        offers |= {_FUSED: int(usable(device)), _TRIED: int(self._kind in weights.tried), _RECORDED: int(records)}
        return offers

    def run(self, mesh: Mesh, x: torch.Tensor, control: Control, agreed: Agreed) -> torch.Tensor | None:
        """What the first rank returns, None on the others."""
        state, request, weights = self._state, self._request, self._weights
        state.residency.store.activate(self._held, ignore)
        group = mesh.members if self.ranks > 1 else None
        votes = StopVotes(control, group)
        history = agreed_history(mesh.sequence_ranks, agreed)
        if history is not None:
            weights.recorded.go_on(mesh.sequence_ranks, history)

        # Of two sizes of picture a rank may have the same share, and another rank may not.
        recorded = partial(weights.recorded.record_or_run, mesh, kind=self._kind, fused=agreed[_FUSED])

        def stop_where_all_do() -> None:
            state.residency.pulse.mark()
            if votes.stop():
                votes.close()
                raise Cancelled

        with torch.random.fork_rng([state.device] if state.device.type == "cuda" else []), torch.inference_mode():
            torch.manual_seed(request.seed)
            output = run_half(
                weights.network, request.half, x, unit=self._unit, ranks=self.ranks, rank=state.rank, group=group,
                options=request.options, tried=bool(agreed[_TRIED]), fused=bool(agreed[_FUSED]),
                now_and_then=stop_where_all_do, through=recorded if agreed[_RECORDED] else None,
                compiled=(lambda: weights.compiled) if agreed[_FUSED] else None,
            )  # fmt: skip
        votes.close()
        weights.tried[self._kind] = weights.tried.get(self._kind, True) and not weights.recorded.failed(mesh)
        return output
