"""A run of a VAE, prepared: what comes to it is looked at, and it is loaded where it is not there."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec
import torch

from ..config import ParallelPlan
from ..errors import RequestError
from ..mesh.agreement import offer_same
from ..requests.control import Cancelled, Control
from ..requests.requests import Answer, RunVae
from ..said import said
from ..vae.shared_vae import run_half, shared_ranks
from ..vae.vae_weights import VaeWeights
from .loaded_model import LoadedModel
from .prepared import Prepared, Results, require_same
from .rank_state import RankState

_DIMS = (3, 4, 5)
"""Of sound, pictures, videos."""
_SAME = "vae"
_TRIED = "vae tried"


@dataclass(kw_only=True)
class PreparedVae(Prepared):
    """Encode or decode.

    Args:
        held: the VAE; None on a rank that has no part in it.
        ranks: that share the picture; 1 where the first runs it alone.
        unit: rows of the tensor that stay together.
    """

    state: RankState
    request: RunVae
    held: tuple[LoadedModel, VaeWeights] | None
    ranks: int
    unit: int

    @classmethod
    def prepare(
        cls, state: RankState, request: RunVae, meta: Mapping[str, torch.Tensor], control: Control
    ) -> PreparedVae:
        """Look at the tensor, have the VAE, and memory for it.

        Raises:
            RequestError: no tensor that a VAE takes.
            As `Vaes.bring`.
        """
        x = meta["x"]
        if x.ndim not in _DIMS or not x.numel():
            raise RequestError(
                said("A VAE cannot take a tensor of the shape {shape}.", shape=tuple(x.shape)),
                "Check the node that gives the latent or the picture.",
            )
        if request.half not in ("encoder", "decoder"):
            raise RequestError(said("A VAE has no {half}.", half=request.half), "Report this.")
        if state.rank >= request.ranks:
            return cls(state=state, request=request, held=None, ranks=1, unit=1, takes_part=False)
        held, weights = state.vaes.bring(request, control)
        unit = 1 if request.half == "decoder" else weights.unit
        ranks = shared_ranks(weights.network, request.half, x.shape, unit, request.ranks)
        if state.rank < ranks:
            held.prepare_run(request.memory // ranks, control.loading)
        offers = offer_same(_SAME, (type(weights.network).__name__, weights.unit, ranks))
        offers[_TRIED] = int((request.half, tuple(x.shape)) in weights.tried)
        found = cls(state=state, request=request, held=(held, weights), ranks=ranks, unit=unit, offers=offers)
        return replace(found, takes_part=state.rank < ranks)

    def work(
        self, tensors: Mapping[str, torch.Tensor], control: Control, agreed: Mapping[str, int]
    ) -> tuple[Answer, Results]:
        """Run it; the first rank returns `output`."""
        started = time.perf_counter()
        state, request = self.state, self.request
        require_same(_SAME, agreed, request.file.path)
        joined = state.meshes.join(ParallelPlan(ulysses=request.ranks))
        results: Results = {}
        run_of = request.half, tuple(tensors["x"].shape)
        if joined is not None and self.held is not None and self.takes_part:
            held, weights = self.held
            held.activate(lambda done, total: None)
            group = joined.mesh.members if self.ranks > 1 else None

            def stop_where_all_do() -> None:
                state.residency.pulse.mark()
                if control.all_stop(group):
                    raise Cancelled

            with torch.random.fork_rng([state.device] if state.device.type == "cuda" else []), torch.inference_mode():
                torch.manual_seed(request.seed)
                output = run_half(
                    weights.network,
                    request.half,
                    tensors["x"],
                    unit=self.unit,
                    ranks=self.ranks,
                    rank=state.rank,
                    group=group,
                    options=request.options,
                    tried=bool(agreed[_TRIED]),
                    now_and_then=stop_where_all_do,
                )
            weights.tried.add(run_of)
            if output is not None:
                results["output"] = output
        answer = state.finished(None, started)
        count = self.ranks
        what = said("Decoded; devices at work: {count}.", count=count)
        if request.half == "encoder":
            what = said("Encoded; devices at work: {count}.", count=count)
        return msgspec.structs.replace(answer, plan=what), results
