"""Timesteps that a model makes of the loop's: under a noise mask one for each token, and one for sound beside a video.

Each is a share of the loop's, and the shares stay the same over a run.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..errors import RequestError
from ..requests.conditioning import Conditioning
from ..requests.requests import Sample, share_name
from ..said import said
from .predict import Call

FIRST = ""
"""Name of the timestep itself, beside those of the conditioning's arguments that are timesteps, too."""


def read_shares(request: Sample, tensors: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """By name for each branch; empty where every token has the loop's own timestep. Runs on meta tensors.

    Raises:
        RequestError: shares did not come along, or are of another batch.
    """
    found = []
    for branch in request.branches:
        shares = {name: tensors.get(share_name(branch.index, name)) for name in request.own_timesteps}
        if any(each is None or each.shape[:1] != tensors["x"].shape[:1] for each in shares.values()):
            raise RequestError(said("The model's own timesteps did not come along for each picture."), "Report this.")
        found.append({name: share for name, share in shares.items() if share is not None})
    return found


def call_of(
    x: torch.Tensor, timestep: torch.Tensor, conditioning: Conditioning, shares: Mapping[str, torch.Tensor]
) -> Call:
    """The call of one branch at a timestep (B,) of the loop."""
    own = {name: share * timestep.reshape(-1, *[1] * (share.ndim - 1)) for name, share in shares.items()}
    first = own.pop(FIRST, timestep)
    if own:
        conditioning = Conditioning({**conditioning.arguments, **own}, conditioning.shared)
    return Call(x, first, conditioning)
