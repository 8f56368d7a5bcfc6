"""A release, prepared: a model's weights go, and the memory that ranks share where no model is left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..requests.control import Control
from ..requests.requests import Answer, Finished, Release
from .prepared import Prepared, Results
from .rank_state import RankState

_UNLOADED = "unloaded"
"""A rank offers 1 where a `Release` leaves it no model: peer memory goes when none is left on any."""


@dataclass(kw_only=True)
class PreparedRelease(Prepared):
    """See the module."""

    state: RankState
    request: Release

    @classmethod
    def prepare(cls, state: RankState, request: Release) -> PreparedRelease:
        """Nothing goes before all ranks are ready."""
        last = not state.residency.has_others(request.model)
        return cls(state=state, request=request, offers={_UNLOADED: int(last)})

    def work(
        self, tensors: Mapping[str, torch.Tensor], control: Control, agreed: Mapping[str, int]
    ) -> tuple[Answer, Results]:
        """Return the memory to the system."""
        state = self.state
        state.forget_requests()
        if agreed[_UNLOADED]:
            state.meshes.free_memory()
            state.residency.forget_runs()
        freed = state.residency.give_back(self.request.model, self.request.park)
        return Finished(bytes_freed=freed, held=state.residency.held()), {}
