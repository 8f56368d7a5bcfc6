"""A request that a rank is ready to run: what all kinds have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field

import torch

from ..errors import CheckpointError
from ..mesh.agreement import agreed_same
from ..requests.control import Cancelled, Control
from ..requests.requests import Answer, Finished

Tensors = Mapping[str, torch.Tensor]
Agreed = Mapping[str, int]
Results = dict[str, torch.Tensor]
Outcome = tuple[Answer, Results]


def require_same(name: str, agreed: Agreed, path: str) -> None:
    """Raise a CheckpointError, on all ranks, where they have unlike files (`offer_same`)."""
    if not agreed_same(name, agreed):
        what = "The hosts have different models at {path}."
        raise CheckpointError(what, "Copy the same file to all of them.", path=path)


@dataclass(kw_only=True)
class Prepared:
    """A request that this rank is ready to run. `run` is called on all ranks or on none."""

    run_it: Callable[[Tensors, Control, Agreed], Outcome]
    undo: Callable[[], None] = lambda: None  # what undoes preparing, where another rank could not prepare
    # What this rank has or can do where ranks may differ and must act alike; `agreed` is the least of all ranks' offers
    # under each name.
    offers: Mapping[str, int] = field(default_factory=dict)
    cancelled: bool = False  # the last run ended because the ranks agreed to stop
    takes_part: bool = True  # this rank has a part in the run, and is not outside of its plan
    # It needs its tensors on the host alone. It takes them on the device, too, where they come by that.
    on_host: bool = False
    names: Callable[[Set[int]], bool] = lambda networks: False  # whether it runs one of these networks beside the model

    def run(self, tensors: Tensors, control: Control, agreed: Agreed | None = None) -> Outcome:
        """Run; `tensors` are on this rank's device, `agreed` is None where this rank is the only one, and what it
        offers holds. Sets `cancelled` where the ranks agreed to stop."""
        try:
            return self.run_it(tensors, control, self.offers if agreed is None else agreed)
        except Cancelled:
            self.cancelled = True
            return Finished(), {}
