"""Weight patches that come to a rank, prepared: they are kept on the host until a request wants them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..networks.comfyui.host_code import use_comfyui
from ..requests.control import Control
from ..requests.requests import Answer, Finished, KeepPatches
from .prepared import Prepared, Results
from .rank_state import RankState


@dataclass(kw_only=True)
class PreparedPatches(Prepared):
    """See the module."""

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
