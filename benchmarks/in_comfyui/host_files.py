"""Files for ComfyUI's own networks: its classes' tensors at a configuration's size, in its formats."""

from __future__ import annotations

import json
import math
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from parallel_runtime.networks.comfyui.without_weights import WithoutWeights

from .host_families import HostFamily
from .random_q4_k import BLOCK, BLOCK_BYTES, q4_k

SCALED_INPUTS = "scaled fp8 inputs"
_ROTATED = 256
"""Numbers that int8's rotation takes together."""
_FLOAT8_MOST, _INT8_DEVIATION, _DEVIATIONS = 448.0, 32.0, 4.0
_CAST_FROM = 1 << 20
"""Numbers of a weight that a cast file has in float8."""


@dataclass(frozen=True)
class Part:
    """One tensor of a file.

    Args:
        make: of the device, gives its values.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[str], torch.Tensor]


def list_parts(family: HostFamily, comfyui: Path, seed: int) -> list[Part]:
    """Tensors of the file.

    Args:
        comfyui: its folder.

    Raises:
        AssertionError: ComfyUI's detection would take the file for something else.
    """
    parts = []
    for key, shape in _shapes(family, comfyui).items():
        parts += _parts(family, key, shape, seed)
    return parts


def header_of(family: HostFamily) -> dict[str, str]:
    """Metadata of the file."""
    return {"config": json.dumps({"transformer": family.header})} if family.header else {}


def _shapes(family: HostFamily, comfyui: Path) -> dict[str, tuple[int, ...]]:
    if str(comfyui) not in sys.path:
        sys.path.append(str(comfyui))  # at the end: it has a module `nodes`
    import comfy.cli_args

    comfy.cli_args.args.cpu = True  # it decides nothing here, and shall take no GPU
    import comfy.model_detection as detection
    import comfy.ops

    config = detection.model_config_from_unet_config(dict(family.config), {})
    assert config is not None, f"ComfyUI knows no {family.title}"
    config.set_inference_dtype(torch.float32, None)
    config.custom_operations = comfy.ops.disable_weight_init
    with WithoutWeights():
        network = config.get_model({}, "", device=torch.device("cpu")).diffusion_model
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    metadata = header_of(family)
    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    seen = detection.model_config_from_unet(empty, "", metadata=metadata)
    assert type(seen) is type(config), f"recognised as {type(seen).__name__}, not {type(config).__name__}"
    return shapes


def _parts(family: HostFamily, key: str, shape: tuple[int, ...], seed: int) -> list[Part]:
    in_blocks = "blocks." in key or key.startswith("layers.")  # the latter of Z-Image
    of_block = len(shape) == 2 and key.endswith(".weight") and in_blocks
    if family.gguf:
        if of_block and shape[1] % BLOCK == 0:
            size = shape[0], shape[1] // BLOCK * BLOCK_BYTES
            deviation = _deviation(shape)
            return [Part(key, size, torch.uint8, lambda device: q4_k(_seeded(seed, key, device), shape, deviation))]
        return make_parts(key, shape, seed, "", torch.float32)
    if family.format == "fp8" and len(shape) == 2 and math.prod(shape) >= _CAST_FROM:
        return make_parts(key, shape, seed, "", torch.float8_e4m3fn)
    return make_parts(key, shape, seed, family.format if of_block else "", family.dtype)


def make_parts(key: str, shape: tuple[int, ...], seed: int, format: str, dtype: torch.dtype) -> list[Part]:
    """One weight and what goes with it in the file.

    Args:
        format: "scaled fp8", the same with "scaled inputs", or "int8" of a product, else it is of `dtype`.
    """
    deviation = _deviation(shape)

    def noise(device: str) -> torch.Tensor:
        return torch.randn(shape, generator=_seeded(seed, key, device), device=device)

    def plain(device: str) -> torch.Tensor:
        values = noise(device)
        if key.endswith("inv_freq"):
            return values.abs()
        if len(shape) < 2 and "norm" in key and key.endswith(("weight", "scale")):
            return values * 0.1 + 1
        return values * deviation

    if format in ("scaled fp8", SCALED_INPUTS):
        scale = _DEVIATIONS * deviation / _FLOAT8_MOST
        inputs = [("input_scale", (), _DEVIATIONS / _FLOAT8_MOST)] if format == SCALED_INPUTS else []
        return [
            Part(
                key, shape, torch.float8_e4m3fn, lambda device: (noise(device) * (deviation / scale)).clamp(-448, 448)
            ),
            *_described(key, {"format": "float8_e4m3fn"}, ("weight_scale", (), scale), *inputs),
        ]
    if format == "int8" and shape[1] % _ROTATED == 0:
        said = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": _ROTATED}
        return [
            Part(key, shape, torch.int8, lambda device: (noise(device) * _INT8_DEVIATION).round().clamp(-127, 127)),
            *_described(key, said, ("weight_scale", (shape[0], 1), deviation / _INT8_DEVIATION)),
        ]
    return [Part(key, shape, dtype, plain)]


def _deviation(shape: tuple[int, ...]) -> float:
    return 1 / math.sqrt(math.prod(shape[1:])) if len(shape) > 1 else 0.02


def _seeded(seed: int, key: str, device: str) -> torch.Generator:
    return torch.Generator(device).manual_seed(zlib.crc32(f"{seed}/{key}".encode()))


def _described(key: str, said: Mapping[str, Any], *scales: tuple[str, tuple[int, ...], float]) -> list[Part]:
    layer = key.removesuffix(".weight")
    text = list(json.dumps(said).encode())
    parts = [
        Part(f"{layer}.{name}", size, torch.float32, partial(_filled, size, scale)) for name, size, scale in scales
    ]
    return [*parts, Part(f"{layer}.comfy_quant", (len(text),), torch.uint8, lambda _: torch.tensor(text))]


def _filled(shape: tuple[int, ...], value: float, device: str) -> torch.Tensor:
    return torch.full(shape, value, device=device)
