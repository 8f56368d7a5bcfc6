"""A FLUX Union ControlNet with random weights: the layout that ComfyUI loads, with the blocks of Union Pro."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .families import Family
from .files import Entry, write_tensors


@dataclass(frozen=True)
class Blocks:
    """How many there are: of two streams, of one, and kinds of pictures that the union knows."""

    double: int = 5
    single: int = 10
    kinds: int = 10


REAL, TINY = Blocks(), Blocks(1, 1, 3)


def write_union(target: Path, family: Family, blocks: Blocks) -> None:
    """Write one beside a FLUX.1 of these widths, in its type. Nothing is done where it is there."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(target, _entries(family.config, blocks), family.dtype, seed=31, device="cpu")


def _entries(config: Mapping[str, Any], blocks: Blocks) -> list[Entry]:
    """Names and shapes of diffusers' class, in which these files are published."""
    import diffusers

    widths = {
        name: config[name]
        for name in (
            "patch_size", "in_channels", "attention_head_dim", "num_attention_heads", "joint_attention_dim",
            "pooled_projection_dim", "guidance_embeds", "axes_dims_rope",
        )
    }  # fmt: skip
    counts = {"num_layers": blocks.double, "num_single_layers": blocks.single, "num_mode": blocks.kinds}
    with torch.device("meta"):
        network: Any = diffusers.FluxControlNetModel(**widths, **counts)
    return [
        Entry(name, tuple(tensor.shape), "norm" in name and name.endswith("weight"))
        for name, tensor in network.state_dict().items()
    ]
