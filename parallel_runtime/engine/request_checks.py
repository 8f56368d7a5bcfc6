"""What a request's tensors are refused for, from their shapes alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..pipefusion.runner import Part, lay_out
from ..requests.conditioning import check_arguments
from ..requests.requests import ConditioningRef
from .plan_meshes import Place
from .rank_state import RankState
from .resident import Resident


def check_conditioning(
    state: RankState,
    reference: ConditioningRef,
    resident: Resident,
    x: torch.Tensor,
    meta: Mapping[str, torch.Tensor],
) -> tuple[int, ...]:
    """Refuse what the model cannot take.

    Args:
        x: that the model will see, (B, C, ...), on the meta device as `meta` is.

    Returns:
        The shape of the text, (B, T, D).

    Raises:
        RequestError: with what does not fit.
    """
    conditioning = state.conditionings.peek(reference, meta)
    check_arguments(conditioning, resident.spec, resident.model_config, x.shape[0])
    shapes = conditioning.on_meta()
    timestep = torch.empty(x.shape[0], device="meta")
    arguments = resident.spec.adapter.to_transformer(
        x, timestep, shapes.context, resident.model_config, **shapes.extras
    )
    resident.spec.check_widths(arguments, resident.model_config)
    return tuple(conditioning.context.shape)


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
    return lay_out(resident.spec, resident.model_config, place.layout, branches, x, patches)[1]
