"""Patches that ComfyUI calls inside of a block, given the tokens of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from .token_split import TokenSplit, take


def over_all_tokens(patches: Mapping[str, Any], names: Collection[str], split: TokenSplit) -> dict[str, Any]:
    """The patches, of which those named take and give tensors (B, tokens, ...) of all ranks; each rank computes them.

    Args:
        names: of patches that are called with one dict and return a tensor, as Wan's are.
    """
    return {
        name: [_whole(each, split) for each in functions] if name in names else functions
        for name, functions in patches.items()
    }


def _whole(patch: Callable[[dict[str, Any]], torch.Tensor], split: TokenSplit) -> Callable[..., torch.Tensor]:
    def run(arguments: dict[str, Any]) -> torch.Tensor:
        streams = split.streams
        assert streams is not None
        own = sum(streams.own)
        whole = {
            name: split.gather_all(value, 1)
            if isinstance(value, torch.Tensor) and value.shape[1:2] == (own,)
            else value
            for name, value in arguments.items()
        }
        with split.outside():
            return take(patch(whole), 1, streams.intervals())

    return run
