"""Latent patches of PipeFusion: where a latent is cut, the tokens that a forward computes of a patch, and the keys and
values of the others from forwards before it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ..errors import UnsupportedModelError
from ..mesh.mesh import Mesh
from .shares import Streams, join_both, split_sizes
from .tables.blocks import Blocks


@dataclass(frozen=True)
class Patch:
    """A band of the latent, and its tokens."""

    index: int  # text runs through the blocks with the first patch of a step
    rows: tuple[int, int]  # (start, stop) in the latent whose dims between channels and columns are flattened to one
    tokens: tuple[int, int]  # (start, stop) in the image tokens of the whole latent

    @property
    def band(self) -> tuple[slice, ...]:
        """Index of the patch's rows in a latent that `flatten_rows` made."""
        return (slice(None), slice(None), slice(*self.rows))


def cut_patches(latent: Sequence[int], patch_size: int, patches: int) -> tuple[Patch, ...]:
    """Cut a latent of shape (batch, channels, [frames,] height, width) into bands of whole token rows, as equal as can
    be, through frames × height: of a video whose height the patch size does not divide, one (planning/wish.py)."""
    *frames, height, width = latent[2:]
    token_rows = math.prod(frames) * -(-height // patch_size)
    columns = -(-width // patch_size)
    assert patches == 1 or (patches <= token_rows and not (frames and height % patch_size))
    rows = math.prod(frames) * height
    cuts = [0, *accumulate(split_sizes(token_rows, patches))]
    return tuple(
        Patch(index, (start * patch_size, min(stop * patch_size, rows)), (start * columns, stop * columns))
        for index, (start, stop) in enumerate(pairwise(cuts))
    )


KeysAndValues = tuple[Tensor, Tensor]
Gather = Callable[[Tensor, int, int], Tensor]  # (this rank's tokens, their dim, how many all ranks have) -> all of them


class LatentPatch:
    """Which tokens the forward at hand computes, and what it reads of the others; `behind` is that of the `Network`."""

    def __init__(self, behind: bool) -> None:
        self._behind = behind
        self._kept: dict[int, list[KeysAndValues]] = {}
        self._layers: list[KeysAndValues] = []
        self._layer = self._image = self._latent = 0
        self._patch: Patch | None = None
        self._tokens, self._keeps = 0, False

    def begin(self, call: int, patch: Patch | None, tokens: int, keeps: bool) -> None:
        """A forward begins, which computes a patch, or with None all tokens; the latent has so many, and each of a
        step's calls keys of its own, which it keeps for patches where it `keeps` any."""
        self._layers = self._kept.setdefault(call, [])
        if patch is None:
            self._layers.clear()
        self._layer = self._image = self._latent = 0
        self._patch, self._tokens, self._keeps = patch, tokens, keeps

    def clear(self) -> None:
        """Let go of all keys and values."""
        self._kept.clear()
        self._layers = []

    @property
    def kept(self) -> list[Tensor]:
        """Keys and values that are here."""
        return [each for layers in self._kept.values() for both in layers for each in both]

    def share_out(self, blocks: Blocks, lengths: Mapping[str, int], mesh: Mesh) -> Streams:
        """The patch's tokens of a block's streams. UnsupportedModelError where the latent's has others than it."""
        if not self._image:  # the first list that runs has the latent's tokens by themselves
            self._image = lengths[blocks.latent]
            if self._image < self._tokens or (self._image > self._tokens and not self._behind):
                what = (
                    "With this input, {path} go over {count} tokens, and the latent has {tokens}: stages cannot "
                    "tell which are the latent's."
                )
                told = {"path": blocks.path, "count": self._image, "tokens": self._tokens}
                raise UnsupportedModelError(what, "Set stages to 1.", **told)
        self._latent = list(lengths).index(blocks.latent)
        degree = mesh.plan.sequence
        shared = tuple(name == blocks.latent for name in lengths)
        starts, sizes = [], []
        for length, latent in zip(lengths.values(), shared, strict=True):
            start, stop = self._span(length, latent)
            starts.append(start)
            sizes.append(split_sizes(stop - start, degree, mesh.speeds) if latent else (stop - start,) * degree)
        return Streams(tuple(lengths.values()), tuple(sizes), mesh.sequence_index, tuple(starts), shared)

    def _span(self, length: int, latent: bool) -> tuple[int, int]:
        """What the patch has of a stream: of the latent's its rows, what stands before them with the first patch, and
        what stands behind with the last. Of another all with the first, and then a token that nothing becomes of, as
        blocks take no empty stream."""
        patch, before = self._patch, length - self._image
        if patch is None:
            return 0, length
        if not latent:
            return 0, min(1, length) if patch.index else length
        start = before + patch.tokens[0] if patch.index else 0
        return start, length if patch.tokens[1] == self._tokens else before + patch.tokens[1]

    def whole(self, key: Tensor, value: Tensor, dim: int, streams: Streams, gather: Gather) -> KeysAndValues:
        """Keys and values of all tokens: the patch's as given, others as kept. Collective over the sequence group."""
        if len(streams.sizes[0]) > 1:
            key, value = join_both(key, value, lambda own: _whole(own, dim, streams, gather))
        layer, self._layer = self._layer, self._layer + 1
        if self._patch is None:
            if self._keeps:
                self._layers.append((key.clone(), value.clone()))
            return key, value
        kept = self._layers[layer]
        first, before = 0, 0
        for index, (start, stop) in enumerate(streams.spans()):
            size = stop - start
            if self._patch.index == 0 or index == self._latent or len(streams.own) == 1:
                for whole, fresh in zip(kept, (key, value), strict=True):
                    whole.narrow(dim, before + start, size).copy_(fresh.narrow(dim, first, size))
            first, before = first + size, before + streams.lengths[index]
        return kept


def _whole(own: Tensor, dim: int, streams: Streams, gather: Gather) -> Tensor:
    parts = zip(own.split(streams.own, dim), streams.spans(), streams.shared, strict=True)
    whole = [gather(part, dim, stop - start) if shared else part for part, (start, stop), shared in parts]
    return torch.cat(whole, dim)
