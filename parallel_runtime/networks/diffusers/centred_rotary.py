"""HunyuanDiT's positions: a picture fitted into a square, centred (arXiv 2405.08748, section 2.2)."""

from __future__ import annotations

import torch

from .call import Call
from .sides import tokens_along

_BASE = 32
"""Tokens along one side of the 512² pictures that positions are measured by."""
_THETA = 10000.0


def rotary_embedding(rows: int, columns: int, head_dim: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Cosine and sine, (rows * columns, head_dim) float32: columns in the first half of the dims, rows in the second.

    Of a picture of so many rows and columns of tokens.
    """
    across, down = (_angles(count, max(rows, columns), head_dim // 2, device) for count in (columns, rows))
    grid = torch.cat([across.expand(rows, -1, -1), down[:, None].expand(-1, columns, -1)], dim=-1).flatten(0, 1)
    return grid.cos(), grid.sin()


def _angles(count: int, longest: int, dim: int, device: torch.device) -> torch.Tensor:
    """(count, dim): angles of evenly spaced positions, each twice (float32; positions are exact to float64)."""
    side = round(_BASE / longest * count)
    places = torch.arange(count, device=device, dtype=torch.float64) * (side / count) + round((_BASE - side) / 2)
    frequencies = _THETA ** -(torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
    return torch.outer(places.float(), frequencies).repeat_interleave(2, dim=1)


def rotary_of(call: Call) -> tuple[torch.Tensor, ...]:
    """`rotary_embedding` of a call's latent."""
    rows, columns = (tokens_along(side, call.config["patch_size"]) for side in call.x.shape[-2:])
    return rotary_embedding(rows, columns, call.config["attention_head_dim"], call.x.device)
