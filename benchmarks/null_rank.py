"""A rank whose engine computes nothing: what is left is the way there and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from parallel_runtime.engine.engine import Engine
from parallel_runtime.engine.prepared import Prepared, Results
from parallel_runtime.requests.control import Control
from parallel_runtime.requests.requests import Answer, Finished, Load, Loaded, Request, Step
from parallel_runtime.said import Said
from workers.rank.start import main


@dataclass(kw_only=True)
class Null(Prepared):
    """Answers at once; a forward's x comes back.

    Args:
        answer: whatever the request is.
    """

    answer: Answer

    def work(
        self, tensors: Mapping[str, torch.Tensor], control: Control, agreed: Mapping[str, int]
    ) -> tuple[Answer, Results]:
        """Compute nothing."""
        return self.answer, {"output": tensors["x"]} if "x" in tensors else {}


class NullEngine(Engine):
    """Answers a forward with its own x. Conditionings are taken in as the real engine does."""

    def prepare(self, request: Request, meta: Mapping[str, torch.Tensor], control: Control) -> Prepared:
        """No validation, no model."""
        if isinstance(request, Load):
            return Null(answer=Loaded("null", 0, 0, False, Said("")))
        return self.recall(Step(0))

    def recall(self, step: Step) -> Prepared:
        """Any call."""
        return Null(answer=Finished())


if __name__ == "__main__":
    main(NullEngine)
