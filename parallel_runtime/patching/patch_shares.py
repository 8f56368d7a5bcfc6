"""Patched weights by shares: of ranks that hold the same weights each computes a part, and hands it to the others.

Whether they do follows from the request, from the machine's numbers, and from what they agreed on: that the weights of
all have the same patches now. What each computes is one whole weight, so it is the same to the last bit.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..requests.facts import MachineFacts
from ..switches import is_on
from .patch_data import PatchSet, WeightPatches, decode_patches

ALWAYS = "PARALLEL_DIT_PATCH_SHARES"
"""A variable that has ranks share where it is not faster, too: for tests."""
_COMPUTED = 95.0
"""10^9 bytes of bf16 weights a second that one rank patches: FLUX.1, a LoRA of rank 16 on all layers, H200."""
_HANDED = 2.0
"""Times that the link needs for the bytes of all weights, until each has gone round by a broadcast of its own."""


class Plain(Protocol):
    """Weights of which some are no more than a tensor."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """None where this rank does not have it."""
        ...

    def plain_dtype(self, name: str) -> torch.dtype | None:
        """None where the weight is quantised."""
        ...


class PatchShares:
    """This rank among those that share, all of the world's."""

    def __init__(self, rank: int, ranks: int):
        self.rank = rank
        self._ranks = ranks

    def owners(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Who computes which weight: the largest first, each by the rank that has least to do. The same on all ranks.

        Args:
            sizes: of each weight.
        """
        work, owners = [0] * self._ranks, {}
        for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
            owners[name] = work.index(min(work))
            work[owners[name]] += sizes[name]
        return owners

    def hand_round(self, weight: torch.Tensor, owner: int) -> None:
        """Have the owner's values. Collective over the world, in the same order on all ranks."""
        dist.broadcast(weight, src=owner)


def worth_sharing(machine: MachineFacts, ranks: int) -> bool:
    """Whether ranks of one host are done sooner with a share each. The same on all ranks whose environment is."""
    if ranks < 2 or not is_on("shares"):
        return False
    if os.environ.get(ALWAYS):
        return True
    one_host = machine.network is None and not machine.ranks_per_host
    return machine.on_gpu and one_host and (1 - 1 / ranks) / _COMPUTED > _HANDED / machine.link.peer


def can_be_shared(wanted: WeightPatches, weights: Plain) -> bool:
    """Whether all patches are such that the weights keep their shape and type, and none can fail to fit.

    The same on all ranks that hold the same weights.
    """
    patches = wanted.patches
    if not patches.name or patches.bypass or wanted.hooks.name:
        return False
    return all(_fits(name, patches, weights) for name in patches.weights)


def _fits(name: str, patches: PatchSet, weights: Plain) -> bool:
    shape = weights.shape(name)
    if shape is None:
        return True  # nobody has it
    if weights.plain_dtype(name) is None:
        return False
    return all(_is_plain_lora(patch, shape) for patch in decode_patches(patches.weights[name], patches.factors))


def _is_plain_lora(patch: Sequence[Any], shape: tuple[int, ...]) -> bool:
    _, adapter, _, offset, function = patch
    if type(adapter).__name__ != "LoRAAdapter" or function is not None:
        return False
    up, down, _, middle, _, reshape = adapter.weights
    if middle is not None or reshape is not None:
        return False
    if offset is not None:
        dim, start, length = offset
        if start + length > shape[dim]:
            return False
        shape = (*shape[:dim], length, *shape[dim + 1 :])
    fits: bool = up.flatten(1).shape[1] == down.shape[0]
    return fits and up.shape[0] * down.flatten(1).shape[1] == math.prod(shape)
