"""What comes to a rank to be kept until a request wants it, prepared: weight patches, and networks beside the model."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..networks.comfyui.comfy_code import use_comfyui
from ..networks.comfyui.module_tree import build_module
from ..requests.control import Control
from ..requests.requests import Answer, Attach, Finished, KeepPatches, attached_name
from .prepared import Prepared, Results
from .rank_state import RankState


@dataclass(kw_only=True)
class PreparedAttach(Prepared):
    """A network beside the model. Every rank keeps it by itself; conditionings name it by its number."""

    state: RankState
    request: Attach

    def work(
        self, tensors: Mapping[str, torch.Tensor], control: Control, agreed: Mapping[str, int]
    ) -> tuple[Answer, Results]:
        """Keep the tensors; with the last of them the network is made."""
        started = time.perf_counter()
        state, request = self.state, self.request
        if request.kept is not None:
            state.detach(request.kept)
        if tensors:
            state.arriving.setdefault(request.number, {}).update(tensors)
        if request.form is not None:
            arrived = state.arriving.get(request.number, {})
            parts = [arrived[attached_name(place)] for place in range(len(arrived))]
            state.conditionings.attach(request.number, build_module(request.form, parts))
            state.arriving.clear()
        return state.finished(None, started), {}


@dataclass(kw_only=True)
class PreparedPatches(Prepared):
    """Weight patches, which calls to come name."""

    state: RankState
    request: KeepPatches

    @classmethod
    def prepare(cls, state: RankState, request: KeepPatches) -> PreparedPatches:
        """Have ComfyUI's code, which computes with them.

        Raises:
            ConfigurationError: there is no ComfyUI on this rank's host.
        """
        code = request.comfyui
        use_comfyui(code.folder, {**code.options, "cpu": state.device.type == "cpu"})
        return cls(state=state, request=request)

    def work(
        self, tensors: Mapping[str, torch.Tensor], control: Control, agreed: Mapping[str, int]
    ) -> tuple[Answer, Results]:
        """Keep them."""
        self.state.patches.keep(self.request, tensors)
        return Finished(), {}
