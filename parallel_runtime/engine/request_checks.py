"""What a request's tensors are refused for, from their shapes alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..errors import RequestError
from ..networks.comfyui.host_family import HostFamily
from ..pipefusion.host_runner import cut_for
from ..pipefusion.kept import kept_bytes
from ..pipefusion.runner import lay_out
from ..requests.facts import RequestFacts, Seen
from ..requests.patches import CARRIED
from ..requests.requests import ConditioningRef
from ..said import said
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
    facts: RequestFacts,
    x: torch.Tensor,
    meta: Mapping[str, torch.Tensor],
) -> int:
    """Refuse a latent that cannot be cut into so many patches; return the bytes of keys and values that this rank keeps
    for them.

    Raises:
        RequestError: with how many it can be cut into, or an input that stages cannot take.
    """
    branches = [state.conditionings.peek(reference, meta) for reference in references]
    family, owned = resident.family, resident.owned(place)
    if isinstance(family, DiffusersFamily):
        parts = lay_out(family.spec, family.config, place.layout, branches, x, patches)[1]
        return kept_bytes(resident.facts, owned, place.layout, parts)
    if any(branch.arguments.get("transformer_options", {}).get(CARRIED) for branch in branches):
        raise RequestError(
            said("A node's function acts inside of the network, which stages cannot."), "Set stages to 1."
        )
    assert isinstance(family, HostFamily)
    cut_for(family.patch[-1], x, patches, place.layout)
    rows = -(-facts.batch // place.layout.plan.batch)
    layers = sum(sum(each) for each in resident.facts.attentions[slice(*owned)])
    tokens = rows * (facts.tokens + facts.text_tokens)
    return 2 * tokens * layers * resident.facts.width * resident.dtype.itemsize
