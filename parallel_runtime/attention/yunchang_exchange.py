"""Ulysses by yunchang's exchange: the plain path behind ours, taken with PARALLEL_DIT_OFF=exchange.

It wants equal shares of tokens and heads that divide; what it cannot do stays with `ulysses_attention`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ConfigurationError
from ..said import said
from ..switches import VARIABLE, is_on
from .kernels import Attend

Exchange = Callable[..., Any]
"""yunchang's all_to_all_4D."""


def chosen_exchange() -> Exchange | None:
    """Return yunchang's exchange where ours is switched off; None keeps ours.

    Only where all ranks are of one host: the variable is the same for them, and ranks that exchange in unlike ways
    would part.

    Raises:
        ConfigurationError: ours is switched off, and yunchang, an extra of the install, is not there.
    """
    if is_on("exchange") or os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        return None
    if importlib.util.find_spec("yunchang") is None:
        raise ConfigurationError(
            said(
                "{variable} switches our exchange off, and the Python package yunchang, whose exchange runs then, is "
                "not installed.",
                variable=VARIABLE,
            ),
            said("Take exchange out of {variable}, or install yunchang.", variable=VARIABLE),
        )
    from yunchang.comm.all_to_all import all_to_all_4D  # here, as it imports whatever attention packages are there

    return all_to_all_4D


def exchange_and_attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    exchange: Exchange,
    kernel: Attend,
    group: dist.ProcessGroup,
    scale: float | None = None,
) -> torch.Tensor:
    """Attend over the tokens of all ranks of the group, as `ulysses_attention` does without a layout or a mask.

    Args:
        query, key, value: (batch, local tokens, heads, head dim), equally many tokens on all ranks, heads a multiple
            of the ranks.
    """
    tokens, heads = 1, 2  # dims
    query, key, value = (exchange(part, heads, tokens, group=group) for part in (query, key, value))
    return exchange(kernel(query, key, value, None, scale).contiguous(), tokens, heads, group=group)
