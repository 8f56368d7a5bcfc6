"""A latent patch: the tokens that a forward computes, and the keys and values of the others from forwards before it.

Ranks share out tokens over space; patches are such shares over time. So a block is cut for a patch by the same data,
and attention asks the kept keys and values for the rest instead of the other ranks. Tokens of other streams than the
latent's, text, are computed with the first patch of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ...errors import UnsupportedModelError
from ...planning.cut import Patch
from ...said import said
from .blocks import Blocks
from .token_split import Streams

KeysAndValues = tuple[torch.Tensor, torch.Tensor]


class LatentPatch:
    """Which tokens the forward at hand computes, and what it reads of the others."""

    def __init__(self) -> None:
        self._kept: dict[int, list[KeysAndValues]] = {}
        self._layers: list[KeysAndValues] = []
        self._layer = self._image = self._latent = 0
        self._patch: Patch | None = None
        self._last = False

    def begin(self, call: int, patch: Patch | None, last: bool) -> None:
        """A forward begins.

        Args:
            call: which of a step's forwards; each has keys of its own.
            patch: None where it computes all tokens.
            last: of the patches, which computes what stands behind the latent's own tokens, too.
        """
        self._layers = self._kept.setdefault(call, [])
        if patch is None:
            self._layers.clear()
        self._layer = self._image = self._latent = 0
        self._patch, self._last = patch, last

    def clear(self) -> None:
        """Let go of all keys and values."""
        self._kept.clear()
        self._layers = []

    def share_out(self, blocks: Blocks, lengths: Mapping[str, int]) -> Streams:
        """The patch's tokens of the streams of a block."""
        if not self._image:  # the first list that runs has the latent's tokens by themselves
            self._image = lengths[blocks.latent]
        self._latent = list(lengths).index(blocks.latent)
        sizes = []
        for name, length in lengths.items():
            start, stop = self._rows(length) if name == blocks.latent else self._text(length)
            sizes.append((start, stop - start, length - stop))
        return Streams(tuple(lengths.values()), tuple(sizes), 1)

    def _rows(self, length: int) -> tuple[int, int]:
        """Of the latent's stream; what stands before its tokens comes with the first patch."""
        patch, before = self._patch, length - self._image
        if patch is None:
            return 0, length
        start = before + patch.tokens[0] if patch.index else 0
        return start, length if self._last else before + patch.tokens[1]

    def _text(self, length: int) -> tuple[int, int]:
        """Of another stream, all with the first patch; then a token that nothing becomes of, as blocks take no empty
        stream."""
        return (0, length) if self._patch is None or self._patch.has_text else (0, min(1, length))

    def whole(self, key: torch.Tensor, value: torch.Tensor, dim: int, streams: Streams) -> KeysAndValues:
        """Keys and values of all tokens: the patch's as they are given, the others as they were kept."""
        layer, self._layer = self._layer, self._layer + 1
        if self._patch is None:
            self._layers.append((key.clone(), value.clone()))
            return key, value
        kept = self._layers[layer]
        first = 0
        for index, ((start, stop), own) in enumerate(zip(streams.intervals(), streams.own, strict=True)):
            if self._patch.has_text or index == self._latent or len(streams.own) == 1:
                for whole, fresh in zip(kept, (key, value), strict=True):
                    whole.narrow(dim, start, stop - start).copy_(fresh.narrow(dim, first, own))
            first += own
        return kept


def require_patches(title: str, lists: Sequence[Blocks]) -> None:
    """Refuse a network whose data does not say which tokens are the latent's.

    Raises:
        UnsupportedModelError: it does not.
    """
    if not lists or any(not blocks.latent for blocks in lists):
        raise UnsupportedModelError(said("{title} cannot be cut into stages.", title=title), "Set stages to 1.")
