"""What a request's tensors are refused for, from their shapes alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..pipefusion.runner import Part, lay_out
from ..requests.facts import Seen
from ..requests.requests import ConditioningRef
from .family import DiffusersFamily
from .plan_meshes import Place
from .rank_state import RankState
from .resident import Resident


def check_conditioning(
    state: RankState,
    reference: ConditioningRef,
    resident: Resident,
    x: torch.Tensor,
    meta: Mapping[str, torch.Tensor],
) -> Seen:
    """Refuse what the model cannot take; return the shapes of the rest.

    Args:
        x: that the model will see, (B, C, ...), on the meta device as `meta` is.

    Raises:
        RequestError: with what does not fit.
    """
    conditioning = state.conditionings.peek(reference, meta)
    return resident.family.check(conditioning, x)


def check_patches(
    state: RankState,
    references: Sequence[ConditioningRef],
    resident: Resident,
    place: Place,
    patches: int,
    x: torch.Tensor,
    meta: Mapping[str, torch.Tensor],
) -> tuple[Part, ...]:
    """Refuse a latent that cannot be cut into so many patches; return this rank's forwards.

    Raises:
        RequestError: with how many it can be cut into.
    """
    branches = [state.conditionings.peek(reference, meta) for reference in references]
    family = resident.family
    assert isinstance(family, DiffusersFamily)  # the other has no stages
    return lay_out(family.spec, family.config, place.layout, branches, x, patches)[1]
