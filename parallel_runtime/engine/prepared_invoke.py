"""A call of a network's method outside of its forward, prepared."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..errors import RequestError
from ..requests.control import Control
from ..requests.requests import INVOKABLE, Answer, Invoke
from ..said import said
from .prepared import Prepared, Results
from .rank_state import RankState
from .resident import Resident
from .structure import HostStructure


@dataclass(kw_only=True)
class PreparedInvoke(Prepared):
    """See the module. Every rank that has the network computes it by itself, as it takes milliseconds."""

    state: RankState
    request: Invoke
    resident: Resident

    @property
    def takes_part(self) -> bool:
        """See `Prepared`."""
        return isinstance(self.resident.structure, HostStructure)

    @classmethod
    def prepare(
        cls, state: RankState, request: Invoke, resident: Resident, meta: Mapping[str, torch.Tensor]
    ) -> PreparedInvoke:
        """Validate.

        Raises:
            RequestError: no network of ComfyUI's, or no method that may be called.
        """
        owns = resident.structure is None or isinstance(resident.structure, HostStructure)
        if request.method not in INVOKABLE or not owns:
            raise RequestError(said("The model in the pool has no {method}.", method=request.method), "Report this.")
        state.conditionings.peek(request.arguments, meta)
        return cls(state=state, request=request, resident=resident)

    def work(
        self, tensors: Mapping[str, torch.Tensor], control: Control, agreed: Mapping[str, int]
    ) -> tuple[Answer, Results]:
        """Call it; ranks with the network return `output`."""
        started = time.perf_counter()
        state, request, structure = self.state, self.request, self.resident.structure
        state.conditionings.drop(request.dropped)
        arguments = state.conditionings.take(request.arguments, tensors).arguments
        results: Results = {}
        if isinstance(structure, HostStructure):
            self.resident.activate(patches=state.patches.find(request.patches))
            results["output"] = structure.transformer.invoke(request.method, arguments)
        return state.finished(None, started), results
