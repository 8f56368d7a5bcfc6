"""A prepared request that does what a function says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from parallel_runtime.engine.prepared import Prepared, Results


@dataclass(kw_only=True)
class PreparedWork(Prepared):
    """Args: run_it: (tensors, control, agreed) -> answer and results."""

    run_it: Callable[[Any, Any, Any], tuple[Any, Results]]

    def work(self, tensors: Any, control: Any, agreed: Any) -> tuple[Any, Results]:
        """Call the function."""
        return self.run_it(tensors, control, agreed)
