"""Attention where the tokens are split over ranks: the way it goes."""

from __future__ import annotations

import torch

from ..acceleration.peer_exchange import peer_attention
from ..attention.kernels import AttentionKernel
from ..attention.ring import RingAttention
from ..attention.ulysses import ulysses_attention
from ..errors import UnsupportedModelError
from ..said import said
from .attended_tokens import AttendedTokens


class SequenceAttention:
    """Attention over the tokens of all ranks."""

    def __init__(self, kernel: AttentionKernel, tokens: AttendedTokens):
        self._kernel = kernel
        self._tokens = tokens

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
    ) -> torch.Tensor:
        tokens = self._tokens
        if tokens.degree == 1:
            return self._kernel.attend(query, key, value, mask, scale)
        if query.shape[:3] != key.shape[:3]:
            raise UnsupportedModelError(
                "The model attends to other tokens than its own, where the sequence is split.",
                "Set ulysses and ring to 1; the batch can still be split.",
            )
        if mask is not None:
            mask = _mask_of_keys(mask, key)
        elif tokens.buffers is not None and tokens.peers is not None and tokens.peers.fits(query):
            return peer_attention(
                query,
                key,
                value,
                kernel=tokens.peers.kernel,
                degree=tokens.degree,
                buffers=tokens.buffers,
                scale=scale,
            )
        if tokens.ulysses_group is None:
            return self._attend_ring(query, key, value, mask, scale)
        return ulysses_attention(
            query,
            key,
            value,
            kernel=self._attend_ring,
            group=tokens.ulysses_group,
            degree=tokens.ulysses,
            layout=tokens.wire,
            mask=mask,
            scale=scale,
        )

    def _attend_ring(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
    ) -> torch.Tensor:
        """Attend with the tokens of this rank's Ulysses group, for its own heads, to the tokens of all groups."""
        tokens = self._tokens
        if tokens.ring_group is None:
            return self._kernel.attend(query, key, value, mask, scale)
        assert self._kernel.attend_with_lse is not None
        ring = RingAttention(
            self._kernel.attend_with_lse, tokens.ring_group, tokens.ring, tokens.ring_index, tokens.ring_layout
        )
        return ring(query, key, value, mask, scale)


def _mask_of_keys(mask: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return the mask of this rank's own keys as (batch or 1, 1, 1, local tokens), which other ranks can use."""
    whole = mask[(None,) * (4 - mask.dim())]
    if whole.shape[1:3] != (1, 1) or whole.shape[0] not in (1, key.shape[0]) or whole.shape[3] != key.shape[1]:
        raise UnsupportedModelError(
            said(
                "The model attends with a mask of shape {shape} where the sequence is split, which is not a mask "
                "of the {shape2} keys of this worker alone.",
                shape=tuple(mask.shape),
                shape2=key.shape[1],
            ),
            "Set ulysses and ring to 1; the batch can still be split.",
        )
    return whole
