"""Which of a network's own weights one of ComfyUI's names stands for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ..networks.diffusers.key_rules import OriginalWeights


class OwnNames:
    """Which of a network's own weights one of ComfyUI's names stands for, where the class is ComfyUI's.

    Args:
        known: the network's.
    """

    def __init__(self, known: Iterable[str]):
        self._known = set(known)

    def parameters(self, name: str) -> tuple[str, ...]:
        """Their names; none where it is not here."""
        return (name,) if name in self._known else ()

    def join(self, name: str, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The weight that they make."""
        return parameters[name]

    def split(self, name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """What each becomes."""
        return {name: weight}


Names = OwnNames | OriginalWeights
