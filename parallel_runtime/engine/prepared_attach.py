"""A network beside the model that is brought to the ranks, prepared: its tensors come in several requests."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..networks.comfyui.module_tree import build_module
from ..requests.control import Control
from ..requests.requests import Answer, Attach, attached_name
from .prepared import Prepared, Results
from .rank_state import RankState


@dataclass(kw_only=True)
class PreparedAttach(Prepared):
    """See the module. Every rank keeps it by itself; conditionings name it by its number."""

    state: RankState
    request: Attach

    def work(
        self, tensors: Mapping[str, torch.Tensor], control: Control, agreed: Mapping[str, int]
    ) -> tuple[Answer, Results]:
        """Keep the tensors; with the last of them the network is made."""
        started = time.perf_counter()
        state, request = self.state, self.request
        state.detach(request.dropped)
        if tensors:
            state.arriving.setdefault(request.number, {}).update(tensors)
        if request.form is not None:
            arrived = state.arriving.get(request.number, {})
            parts = [arrived[attached_name(place)] for place in range(len(arrived))]
            state.conditionings.attach(request.number, build_module(request.form, parts))
            state.arriving.clear()
        return state.finished(None, started), {}
