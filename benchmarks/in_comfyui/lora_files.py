"""A LoRA for every layer of a model file, with random weights: what artists download, at its real size."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from parallel_runtime.loading.header import read_header

RANK = 16
_SPREAD = 0.02
"""Of the factors: a layer's output then changes by some percent."""


def write_lora(model: Path, target: Path, rank: int = RANK, seed: int = 0) -> int:
    """Write one in bf16 for all matrices of a model; return how many these are. Nothing is done where it is there."""
    header, _ = read_header(model)
    shapes = {name.removesuffix(".weight"): info.shape for name, info in header.items() if name.endswith(".weight")}
    layers = {name: shape for name, shape in shapes.items() if len(shape) == 2}
    if target.exists():
        return len(layers)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (outputs, inputs) in layers.items():
        for side, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            factor = torch.randn(shape, generator=generator) * _SPREAD
            tensors[f"diffusion_model.{name}.lora_{side}.weight"] = factor.bfloat16()
    target.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, target)
    return len(layers)
