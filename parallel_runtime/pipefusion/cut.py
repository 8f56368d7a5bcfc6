"""Where PipeFusion cuts: blocks into stages, the latent into patches. Pure; every rank computes the same numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..errors import ConfigurationError, RequestError


@dataclass(frozen=True)
class Patch:
    """A band of the latent, and its tokens.

    Args:
        index: from 0.
        rows: (start, stop) in the latent whose dims between channels and columns are flattened to one.
        tokens: (start, stop) in the image tokens of the whole latent.
    """

    index: int
    rows: tuple[int, int]
    tokens: tuple[int, int]

    @property
    def length(self) -> int:
        """Image tokens."""
        return self.tokens[1] - self.tokens[0]

    @property
    def has_text(self) -> bool:
        """Text runs through the blocks with the first patch of a step."""
        return self.index == 0

    @property
    def band(self) -> tuple[slice, ...]:
        """Index of the patch's rows in a latent that `flatten_rows` made."""
        return (slice(None), slice(None), slice(*self.rows))


def split_blocks(costs: Sequence[float], stages: int) -> tuple[tuple[int, int], ...]:
    """Deal consecutive blocks to stages so that the slowest stage is as fast as can be.

    Args:
        costs: of each block, in forward order, in any unit.

    Returns:
        (start, stop) of each stage; no stage is empty.

    Raises:
        ConfigurationError: more stages than blocks.
    """
    if not 1 <= stages <= len(costs):
        raise ConfigurationError(
            f"{len(costs)} blocks cannot make {stages} stages.", f"Set stages to a number from 1 to {len(costs)}."
        )
    sums = [0.0, *accumulate(costs)]
    # For the first blocks up to `stop`: the cost of the slowest stage, how uneven the stages are, where each starts.
    deals: dict[int, tuple[float, float, tuple[int, ...]]] = {
        stop: (sums[stop], sums[stop] ** 2, (0,)) for stop in range(1, len(costs) + 1)
    }
    for stage in range(1, stages):
        deals = {
            stop: min(_add_stage(deals[start], start, sums[stop] - sums[start]) for start in range(stage, stop))
            for stop in range(stage + 1, len(costs) + 1)
        }
    starts = deals[len(costs)][2]
    return tuple(zip(starts, (*starts[1:], len(costs)), strict=True))


def split_mirrored(blocks: int, stages: int) -> tuple[tuple[int, int], ...]:
    """Deal the blocks of a U-shaped model, so that the two ends of every skip connection are in mirrored stages.

    Raises:
        ConfigurationError: an odd number of stages or blocks, or more stages than blocks.
    """
    if stages % 2 or blocks % 2:
        raise ConfigurationError(
            f"{blocks} blocks with skip connections cannot make {stages} stages.",
            "Set stages to an even number: skip connections lead from the first half to its mirror image.",
        )
    half = split_blocks([1.0] * (blocks // 2), stages // 2)
    return (*half, *((blocks - stop, blocks - start) for start, stop in reversed(half)))


def _add_stage(
    deal: tuple[float, float, tuple[int, ...]], start: int, cost: float
) -> tuple[float, float, tuple[int, ...]]:
    worst, uneven, starts = deal
    return max(worst, cost), uneven + cost**2, (*starts, start)


def cut_patches(
    latent: Sequence[int], patch_size: int, patches: int, image_tokens: int | None = None
) -> tuple[Patch, ...]:
    """Cut a latent into bands of whole token rows, as equal as can be.

    Args:
        latent: shape (batch, channels, height, width), or (batch, channels, frames, height, width): then the bands
            run through frames × height.
        image_tokens: of the whole forward, where there are more than the latent's: those behind them, of reference
            images, go with the last patch.

    Raises:
        RequestError: fewer token rows than patches, or a video whose height the patch size does not divide.
    """
    *frames, height, width = latent[2:]
    if frames and height % patch_size:
        raise RequestError(
            f"PipeFusion cannot cut a video latent of height {height}.",
            f"Use a height that {patch_size} divides, or set stages to 1.",
        )
    token_rows = math.prod(frames) * -(-height // patch_size)
    columns = -(-width // patch_size)
    if patches > token_rows:
        raise RequestError(
            f"A latent of {token_rows} token rows cannot be cut into {patches} patches.",
            f"Set patches to {token_rows} or less, or use a larger picture.",
        )
    rows = math.prod(frames) * height
    share, rest = divmod(token_rows, patches)
    cuts = [0, *accumulate(share + (patch < rest) for patch in range(patches))]
    tokens = [cut * columns for cut in cuts[:-1]] + [image_tokens or token_rows * columns]
    return tuple(
        Patch(
            index,
            (cuts[index] * patch_size, min(cuts[index + 1] * patch_size, rows)),
            (tokens[index], tokens[index + 1]),
        )
        for index in range(patches)
    )
