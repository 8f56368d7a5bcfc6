"""A growth, prepared: ranks leave their world for a larger one, and keep what each has by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ..errors import RequestError
from ..mesh.groups import names_used
from ..requests.control import Control
from ..requests.requests import Answer, Grow, Grown
from .prepared import Prepared, Results
from .rank_state import RankState

_NAMES = "names of groups"
"""A rank offers the negative of how many it has used: the groups of a larger world get names that are new to all."""


@dataclass(kw_only=True)
class PreparedGrowth(Prepared):
    """See the module.

    Args:
        meet: see `RankState`.
    """

    state: RankState
    request: Grow
    meet: Callable[[tuple[int, ...], int], None]

    @classmethod
    def prepare(cls, state: RankState, request: Grow) -> PreparedGrowth:
        """Nobody leaves before all ranks are there.

        Raises:
            RequestError: nobody can start more ranks.
        """
        if state.meet is None:
            raise RequestError("Ranks that were started from a script take in no others.", "Start more of them.")
        return cls(state=state, request=request, meet=state.meet, offers={_NAMES: -names_used()})

    def work(
        self, tensors: Mapping[str, torch.Tensor], control: Control, agreed: Mapping[str, int]
    ) -> tuple[Answer, Results]:
        """Leave, and meet in the larger world."""
        state = self.state
        state.forget_requests()
        state.patches.clear()
        state.meshes.free_memory()
        state.residency.leave_world()
        self.meet(self.request.devices, -agreed[_NAMES])
        state.enter_world(len(self.request.devices))
        return Grown(self.request.devices, state.residency.held()), {}
