"""Loops as tests ask for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from parallel_runtime.requests.requests import Sample, concat_name
from workers.client.node_requests import LoopRequest


def make_loop(
    sampler: str,
    sigmas: torch.Tensor,
    x: torch.Tensor,
    branches: Mapping[int, Mapping[str, Any]],
    cfg: float,
    *,
    timesteps: torch.Tensor | None = None,
    concat: Sequence[torch.Tensor] = (),
    inpaint: Mapping[str, torch.Tensor] | None = None,
    **more: Any,
) -> LoopRequest:
    """One whose transformer is told the sigmas, if no timesteps."""
    job = Sample("", sampler, (), cfg, inpaint=inpaint is not None, concat=bool(concat), **more)
    appended = {concat_name(index): each for index, each in zip(branches, concat, strict=False)}
    told = sigmas if timesteps is None else timesteps
    return LoopRequest(job, branches, {"x": x, "sigmas": sigmas, "timesteps": told, **appended, **(inpaint or {})})
