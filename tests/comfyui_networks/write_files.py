"""Writes a small model file of each family: random weights at the smallest size that ComfyUI recognises.

python -m tests.comfyui_networks.write_files COMFYUI FOLDER NAME...: FOLDER/NAME.safetensors for each that is named, of
files.py or large_files.py; prints as JSON what this ComfyUI says to those that it does not know, and exits with 1 then.
"""

from __future__ import annotations

import json
import math
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.comfyui_networks.files import FILES, File
from tests.comfyui_networks.large_files import LARGE_FILES


def _load(config: Any, tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    """The network of a configuration of ComfyUI's, without values."""
    import comfy.ops

    config.set_inference_dtype(torch.float32, None)
    config.custom_operations = comfy.ops.disable_weight_init
    return config.get_model(dict(tensors), "", device=torch.device("cpu")).diffusion_model


def _draw(name: str, shape: tuple[int, ...], pool: torch.Tensor) -> torch.Tensor:
    """Random numbers: products keep the scale of what goes in; norms near one. Of a pool, as drawing takes longer."""
    count = math.prod(shape)
    start = sum(name.encode()) % 1000
    drawn = pool.repeat(-(-(start + count) // len(pool)))[start : start + count].reshape(shape)
    if len(shape) > 1:
        return drawn / math.sqrt(max(1, count // shape[0]))
    if name.endswith("inv_freq"):
        return drawn.abs()
    return 0.1 * drawn + (1.0 if "norm" in name and name.endswith(("weight", "scale", "gamma")) else 0.0)


def tensors_of(file: File) -> dict[str, torch.Tensor]:
    """The file's content.

    Raises:
        AssertionError: ComfyUI says something else of it than the table.
    """
    import comfy.model_detection as detection

    pool = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0))
    extra = {name: _draw(name, shape, pool) for name, shape in file.extra.items()}
    config = detection.model_config_from_unet_config(dict(file.config), extra)
    names = {name: tensor.shape for name, tensor in _load(config, extra).state_dict().items()}
    tensors = extra | {name: _draw(name, tuple(shape), pool) for name, shape in names.items()}
    seen = detection.model_config_from_unet(tensors, "", metadata=header_of(file))
    assert type(seen) is type(config), f"recognised as {type(seen).__name__}, not {type(config).__name__}"
    assert {name: tensor.shape for name, tensor in _load(seen, extra).state_dict().items()} == names
    if file in LARGE_FILES.values():
        for name in [name for name, tensor in tensors.items() if tensor.ndim == 2 and tensor.numel() > 1 << 20]:
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    return tensors


def header_of(file: File) -> dict[str, str]:
    """Metadata of the file."""
    return {"config": json.dumps({"transformer": file.metadata})} if file.metadata else {}


if __name__ == "__main__":
    comfyui, folder, *named = sys.argv[1:]
    sys.path.append(comfyui)
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    failed = {}
    for each in named:
        wanted = (FILES | LARGE_FILES)[each]
        try:
            with torch.no_grad():  # as ComfyUI's nodes run: some of its classes fill their weights themselves
                tensors = tensors_of(wanted)
        except (AssertionError, AttributeError, ImportError, KeyError, RuntimeError, TypeError, ValueError) as error:
            traceback.print_exc()
            failed[each] = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            save_file(tensors, Path(folder) / f"{each}.safetensors", header_of(wanted))
    print(json.dumps(failed))
    sys.exit(bool(failed))
