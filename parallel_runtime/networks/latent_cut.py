"""Where PipeFusion cuts a latent into patches. Pure; every rank computes the same numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..errors import RequestError
from ..said import said


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
        RequestError: fewer token rows than patches, or several of a video whose height the patch size does not divide.
    """
    *frames, height, width = latent[2:]
    if patches > 1 and frames and height % patch_size:
        raise RequestError(
            said("PipeFusion cannot cut a video latent of height {height}.", height=height),
            said("Use a height that {patch_size} divides, or set patches to 1.", patch_size=patch_size),
        )
    token_rows = math.prod(frames) * -(-height // patch_size)
    columns = -(-width // patch_size)
    if patches > token_rows:
        raise RequestError(
            said(
                "A latent of {token_rows} token rows cannot be cut into {patches} patches.",
                token_rows=token_rows,
                patches=patches,
            ),
            said("Set patches to {token_rows} or less, or use a larger picture.", token_rows=token_rows),
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
