"""What the tests of the model files share: headers, and a checkpoint's forward in ComfyUI's convention."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.load_transformer import load_transformer
from parallel_runtime.loading.checkpoint import open_checkpoint
from parallel_runtime.networks.diffusers.key_rules import TensorInfo, WeightRule
from parallel_runtime.networks.diffusers.spec import ModelSpec

CPU = torch.device("cpu")


def header_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorInfo]:
    """Safetensors header of these tensors."""
    return {key: TensorInfo(tuple(tensor.shape), "F32") for key, tensor in tensors.items()}


@torch.no_grad()
def comfyui_call(path: Path, call: Mapping[str, Any]) -> torch.Tensor:
    """Load a checkpoint and run one call of ComfyUI's on diffusers' transformer, through the adapter."""
    checkpoint = open_checkpoint(path)
    transformer = load_transformer(checkpoint, torch.float32, CPU)
    extras = dict(call)
    x, timestep, context = (extras.pop(key) for key in ("x", "timestep", "context"))
    arguments = checkpoint.spec.adapter.to_transformer(x, timestep, context, checkpoint.config, **extras)
    output = transformer(**arguments, return_dict=False)[0]
    return checkpoint.spec.adapter.from_transformer(output, x)


def relative_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest expected value."""
    assert output.shape == expected.shape
    return float((output.float() - expected.float()).abs().max() / expected.float().abs().max())


def rules_of(spec: ModelSpec, tensors: Mapping[str, torch.Tensor]) -> dict[str, WeightRule]:
    """By their target, the rules for a transformer with these parameters."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    return {rule.target: rule for rule in spec.keys.weight_rules(shapes)}


def apply_rules(rules: Mapping[str, WeightRule], original: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the rules, by their target, make of an original file's tensors; written for tests, apart from loading."""
    made = {}
    for target, rule in rules.items():
        tensor = original[rule.source]
        if rule.rows is not None:
            tensor = tensor[rule.rows[0] : sum(rule.rows)]
        made[target] = torch.cat(tensor.chunk(2)[::-1]) if rule.swap_halves else tensor
    return made
