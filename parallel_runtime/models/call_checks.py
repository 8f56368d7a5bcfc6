"""What the adapters check of ComfyUI's call in the same way. Shapes only, so that it runs on the meta device too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..errors import RequestError


def check_call(
    title: str, x: torch.Tensor, context: torch.Tensor, extras: Mapping[str, Any], known: Iterable[str]
) -> None:
    """Refuse a call that is none for a picture model: wrong dimensions, unequal batches, unknown arguments.

    Args:
        title: how artists call the family.
        x: (B, C, H, W). context: (1 or B, tokens, width).
        extras: the other arguments; those that are None count as left out. `known` are the names it may hold.

    Raises:
        RequestError: with what was given.
    """
    if x.ndim != 4 or context.ndim != 3 or context.shape[0] not in (1, x.shape[0]):
        raise RequestError(
            f"{title} takes a latent (batch, channels, height, width) and text (batch, tokens, width), and got "
            f"{tuple(x.shape)} and {tuple(context.shape)}.",
            f"Use a latent and a prompt made for {title}.",
        )
    given = {name for name, value in extras.items() if value is not None}
    if unknown := sorted(given.difference(known)):
        raise RequestError(f"{title} in the pool does not take {', '.join(unknown)}.", "Remove the node that adds it.")


def per_item(title: str, name: str, value: torch.Tensor, batch: int) -> torch.Tensor:
    """One value per batch item, as (batch,).

    Raises:
        RequestError: another number of values.
    """
    flat = value.reshape(-1)
    if flat.shape[0] not in (1, batch):
        raise RequestError(
            f"{title} got {flat.shape[0]} values of {name} for a batch of {batch}.",
            "Check the nodes that change the conditioning.",
        )
    return flat.expand(batch)


def pooled_text(title: str, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The pooled text (1 or B, width) for every batch item, in x's dtype.

    Raises:
        RequestError: other dimensions.
    """
    if y.ndim != 2 or y.shape[0] not in (1, x.shape[0]):
        raise RequestError(
            f"{title} takes a pooled text for each of {x.shape[0]} pictures, and got {tuple(y.shape)}.",
            f"Encode the prompt with the text encoders of {title}.",
        )
    return y.to(x).expand(x.shape[0], -1)
