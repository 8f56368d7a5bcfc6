"""A run of a VAE, prepared: what comes to it is looked at, and it is loaded where it is not there."""

from __future__ import annotations

import torch

from ..acceleration.channels_last import usable
from ..config import ParallelPlan
from ..errors import RequestError
from ..loading.reading import ignore
from ..mesh.agreement import agreed_history, offer_history, offer_same
from ..requests.control import Cancelled, Control, StopVotes
from ..requests.requests import Finished, RunVae
from ..said import said
from ..vae.families import can_be_recorded
from ..vae.shared_vae import Run, run_half, shared_ranks
from ..vae.vae_weights import VaeWeights
from .prepared import Agreed, Outcome, Prepared, Tensors, require_same
from .rank_state import RankState

_DIMS = (3, 4, 5)  # of sound, pictures, videos
_SAME = "vae"
_TRIED = "vae tried"
_FUSED = "vae fused"
_RECORDED = "vae recorded"
_SPARE = 2  # a run is recorded, whose memory stays taken, where so many times its memory is free on every rank


def prepare_vae(state: RankState, request: RunVae, meta: Tensors, control: Control) -> Prepared:
    """Encode or decode: look at the tensor, have the VAE, and memory for it."""
    x = meta["x"]
    if x.ndim not in _DIMS or not x.numel():
        text = "A VAE cannot take a tensor of the shape {shape}."
        raise RequestError(text, "Check the node that gives the latent or the picture.", shape=tuple(x.shape))
    if request.half not in ("encoder", "decoder"):
        raise RequestError("A VAE has no {half}.", "Report this.", half=request.half)
    ranks, offers, takes_part, records = 1, dict[str, int](), False, False
    kind = request.half, tuple(x.shape)
    if state.rank < request.ranks:
        held = state.residency.load_vae(request, control)
        assert isinstance(held.weights, VaeWeights)
        weights = held.weights
        tried = weights.tried
        unit = 1 if request.half == "decoder" else weights.unit
        ranks = shared_ranks(weights.network, request.half, x.shape, unit, request.ranks)
        takes_part = state.rank < ranks
        if takes_part:
            needs = request.memory // ranks
            state.residency.store.prepare_run(held, needs, control.loading)
            may_be = can_be_recorded(weights.network, request.half, state.device) and not request.options
            may_be &= kind in tried and kind not in weights.unrecorded
            # What other recordings hold counts as free elsewhere, and is not.
            if may_be:
                records = kind in weights.replayed or torch.cuda.mem_get_info(state.device)[0] >= _SPARE * needs
        offers = offer_same(_SAME, (type(weights.network).__name__, weights.unit, ranks))
        offers[_FUSED] = int(usable(state.device))
        offers[_TRIED] = int(kind in tried)
        offers[_RECORDED] = int(records)
        offers |= offer_history(range(ranks), weights.recorded.history(tuple(range(ranks))))

    def work(tensors: Tensors, control: Control, agreed: Agreed) -> Outcome:
        """Run it; the first rank returns `output`."""
        require_same(_SAME, agreed, request.file.path)
        mesh = state.meshes.join(ParallelPlan(ulysses=request.ranks))
        output = None
        if mesh is not None and takes_part:
            state.residency.store.activate(held, ignore)
            group = mesh.members if ranks > 1 else None
            votes = StopVotes(control, group)
            history = agreed_history(mesh.sequence_ranks, agreed)
            if history is not None and not weights.recorded.go_on(mesh.sequence_ranks, history):
                weights.replayed.clear()

            def through(run: Run, own: torch.Tensor) -> torch.Tensor:
                if not agreed[_RECORDED]:
                    return run(own)
                # Of two sizes of picture a rank may have the same share, and another rank may not.
                return weights.recorded.record_or_run(mesh, run, own, rows=meta["x"].shape[-2], fused=agreed[_FUSED])

            def stop_where_all_do() -> None:
                state.residency.pulse.mark()
                if votes.stop():
                    votes.close()
                    raise Cancelled

            with torch.random.fork_rng([state.device] if state.device.type == "cuda" else []), torch.inference_mode():
                torch.manual_seed(request.seed)
                output = run_half(
                    weights.network, request.half, tensors["x"], unit=unit, ranks=ranks, rank=state.rank, group=group,
                    options=request.options, tried=bool(agreed[_TRIED]), fused=bool(agreed[_FUSED]),
                    now_and_then=stop_where_all_do, through=through,
                )  # fmt: skip
            votes.close()
            tried.add(kind)
            if weights.recorded.failed(mesh):
                weights.unrecorded.add(kind)
            elif agreed[_RECORDED] and weights.recorded.recorded_last(mesh):
                weights.replayed.add(kind)
        encodes = request.half == "encoder"
        what = "Encoded; devices at work: {count}." if encodes else "Decoded; devices at work: {count}."
        answer = Finished(said(what, count=ranks), held=state.residency.held())
        return answer, {} if output is None else {"output": output}

    return Prepared(run_it=work, offers=offers, takes_part=takes_part)
