"""Some rows of int8 layers, which round their input token by token: it may be that of another rank's tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .quantised_layers import KINDS, some_rows, whole_products


@dataclass(frozen=True)
class Int8Layer:
    """A `Layer` (attention/projections.py) of int8; arguments as of the operator `quantised_layer`."""

    inside: list[torch.Tensor]
    kind: str

    def rows(self, first: int, size: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """As they lie there."""
        emptied = KINDS[self.kind]
        layer = some_rows(emptied.filled(self.inside), first, size)

        def run(x: torch.Tensor) -> torch.Tensor:
            with whole_products():
                output: torch.Tensor = emptied.own.forward(layer, x)
            return output.contiguous()

        return run
