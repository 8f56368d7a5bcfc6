"""A rank whose engine computes nothing: what is left is the way there and back."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from parallel_runtime.engine.engine import Engine, Prepared
from parallel_runtime.requests.control import Control
from parallel_runtime.requests.requests import Finished, Load, Loaded, Request, Step
from workers.rank import rank


class NullEngine(Engine):
    """Answers a forward with its own x. Conditionings are taken in as the real engine does."""

    def prepare(self, request: Request, meta: Mapping[str, torch.Tensor], control: Control) -> Prepared:
        """No validation, no model."""
        if isinstance(request, Load):
            return Prepared(lambda tensors, control, agreed: (Loaded("null", 0, 0, False, ""), {}))
        return self.recall(Step(0))

    def recall(self, step: Step) -> Prepared:
        """Any call."""
        return Prepared(lambda tensors, control, agreed: (Finished(), {"output": tensors["x"]}))


if __name__ == "__main__":
    rank.main(NullEngine)
