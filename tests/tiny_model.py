"""Makes tiny checkpoints of any family with random weights, in the file formats that artists have.

The same seed and config give the same weights in every layout.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from parallel_runtime.loading.checkpoint import MODELS
from parallel_runtime.networks.diffusers.spec import ModelSpec
from tests.authors_names import NAMES, to_authors

METADATA = {"format": "pt"}


def find_by_name(name: str) -> ModelSpec:
    """The family of a name."""
    return next(spec for spec in MODELS if NAMES[spec.transformer_class] == name)


def make_state_dict(
    spec: ModelSpec, config: Mapping[str, Any], dtype: torch.dtype = torch.float32, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Random diffusers state dict: every matrix keeps its input's scale, norms are near one, nothing is zero."""
    import diffusers  # here, because the import takes seconds

    with torch.device("meta"):
        transformer: Any = getattr(diffusers, spec.transformer_class)(**config)
    shapes = {name: tensor.shape for name, tensor in transformer.state_dict().items()}
    return {name: _random(name, shape, seed).to(dtype) for name, shape in shapes.items()}


def _random(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    # A generator per tensor, so that a weight depends on its name and the seed only.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    noise = torch.randn(shape, generator=generator)
    if len(shape) > 1 and name.endswith("weight"):
        return noise / math.sqrt(math.prod(shape[1:]))
    if len(shape) > 1:  # a table, such as that of positions
        return noise
    return 1 + 0.1 * noise if "norm" in name and name.endswith("weight") else 0.02 * noise


def write_original(
    spec: ModelSpec,
    path: Path,
    config: Mapping[str, Any],
    prefix: str = "",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Path:
    """Write a single file as its authors publish it, or with a `prefix` as full checkpoints have it."""
    original = to_authors(NAMES[spec.transformer_class], make_state_dict(spec, config, dtype, seed))
    save_file({prefix + key: tensor for key, tensor in original.items()}, path, metadata=METADATA)
    return path


def write_diffusers_file(
    spec: ModelSpec, path: Path, config: Mapping[str, Any], dtype: torch.dtype = torch.float32, seed: int = 0
) -> Path:
    """Write a single file with diffusers' names, without a config.json."""
    save_file(make_state_dict(spec, config, dtype, seed), path, metadata=METADATA)
    return path


def write_diffusers_folder(
    spec: ModelSpec,
    path: Path,
    config: Mapping[str, Any],
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    pipeline: str = "",
) -> Path:
    """Write a diffusers transformer folder, in several files if asked; `pipeline` puts it into a folder of that class.

    Returns:
        `path`.
    """
    folder = path / "transformer" if pipeline else path
    folder.mkdir(parents=True, exist_ok=True)
    if pipeline:
        index = {"_class_name": pipeline, "transformer": ["diffusers", spec.transformer_class]}
        (path / "model_index.json").write_text(json.dumps(index))
    written = {"_class_name": spec.transformer_class, "_diffusers_version": "0.30.0", **config}
    (folder / "config.json").write_text(json.dumps(written))
    state_dict = make_state_dict(spec, config, dtype, seed)
    if shards == 1:
        save_file(state_dict, folder / "diffusion_pytorch_model.safetensors", metadata=METADATA)
        return path
    weight_map = {}
    for number in range(shards):
        name = f"diffusion_pytorch_model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(state_dict.items())[number::shards])
        save_file(part, folder / name, metadata=METADATA)
        weight_map.update(dict.fromkeys(part, name))
    index_file = folder / "diffusion_pytorch_model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path
