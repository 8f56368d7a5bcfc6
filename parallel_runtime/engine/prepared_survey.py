"""A survey, prepared: what the model of a load to come would take of the devices, and what these have for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ..config import ParallelConfig
from ..planning.plan import TYPICAL, choose
from ..planning.weights_choice import choose_weights
from ..requests.control import Control
from ..requests.facts import CPU
from ..requests.requests import Answer, Survey, Surveyed
from .prepared import Prepared, Results
from .rank_state import RankState

_FREE = "free"
_STEP = 512 << 20
"""What is free counts in whole ones, so that a little more or less of it makes no other plan."""


@dataclass(kw_only=True)
class PreparedSurvey(Prepared):
    """See the module.

    Args:
        needs: bytes of weights.
    """

    state: RankState
    request: Survey
    needs: int

    @classmethod
    def prepare(cls, state: RankState, request: Survey) -> PreparedSurvey:
        """Open the file, and offer what this rank has.

        Raises:
            ParallelError: as the load would.
        """
        load = request.load
        config = ParallelConfig.from_mapping(load.config)
        machine = replace(load.machine or CPU, speeds=tuple(state.meshes.speeds or ()), free_bytes=0)
        opened = state.open(load)
        facts, weight_bytes = opened.facts, opened.weight_bytes
        config = choose_weights(config, load.ranks, facts, machine, weight_bytes)
        cost = choose(config, load.ranks, facts, TYPICAL, machine).cost
        needs = int(cost.weight_bytes * weight_bytes / (facts.parameters * facts.bytes_per_parameter))
        # A rank that the model does not use may be as full as it likes.
        used = state.rank < load.ranks
        offers = {_FREE: state.residency.store.could_have()} if used else {}
        return cls(state=state, request=request, needs=needs, offers=offers)

    def work(
        self, tensors: Mapping[str, torch.Tensor], control: Control, agreed: Mapping[str, int]
    ) -> tuple[Answer, Results]:
        """Tell what the rank has that has the least."""
        held = self.state.residency.held()
        needs = 0 if self.request.load.model in held else self.needs
        return Surveyed(max(1, agreed[_FREE] // _STEP * _STEP), needs, held), {}
