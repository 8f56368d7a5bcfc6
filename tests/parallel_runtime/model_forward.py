"""What the tests of the model files share: a checkpoint's forward in ComfyUI's convention."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.load_transformer import load_transformer
from parallel_runtime.loading.checkpoint import open_checkpoint

CPU = torch.device("cpu")


@torch.no_grad()
def comfyui_call(path: Path, call: Mapping[str, Any]) -> torch.Tensor:
    """Load a checkpoint and run one call of ComfyUI's on diffusers' transformer, through the adapter."""
    checkpoint = open_checkpoint(path)
    transformer = load_transformer(checkpoint, torch.float32, CPU)
    extras = dict(call)
    x, timestep, context = (extras.pop(key) for key in ("x", "timestep", "context"))
    arguments = checkpoint.spec.to_transformer(x, timestep, context, checkpoint.config, **extras)
    output = transformer(**arguments, return_dict=False)[0]
    return checkpoint.spec.from_transformer(output, x)


def relative_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest expected value."""
    assert output.shape == expected.shape
    return float((output.float() - expected.float()).abs().max() / expected.float().abs().max())
