"""A file loaded by ComfyUI's own loader and by ours, and calls of both networks, in one process on one rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from parallel_runtime.config import COMFYUIS
from parallel_runtime.networks.comfyui.comfy_code import use_comfyui

_CALLS = {"cpu": 2, "cuda": 5}
"""On a GPU a forward is recorded at its third, and replayed from then on."""
FILES = {
    "FLUX.1": ("flux", "bfloat16"),
    "FLUX.1 int8": ("flux", "int8_tensorwise"),
    "FLUX.1 int8 rotated": ("flux", "int8_rotated"),
    "FLUX.1 scaled fp8": ("flux", "float8_e4m3fn"),
    "Wan": ("wan-t2v", "bfloat16"),
    "Qwen-Image fp8": ("qwen-image", "fp8"),
    "Z-Image": ("z-image", "bfloat16"),
}
"""Name -> file of files.py or large_files.py, and its format: a type, or one of formats.py."""


def compare(
    rank: int,
    world_size: int,
    comfyui: str,
    folder: str,
    names: list[str],
    attention: str = COMFYUIS,
    gpu: bool = False,
) -> dict[str, Any]:
    """{name: numbers of each call's result whose bits are others, of how many}: one row, and two as CFG has."""
    use_comfyui(comfyui, {} if gpu else {"cpu": True})
    torch.set_grad_enabled(False)
    return {name: _compare(Path(folder) / f"{name}.safetensors", *FILES[name], attention, gpu) for name in names}


def _compare(path: Path, file: str, format: str, attention: str, gpu: bool) -> list[list[int]]:
    import comfy.model_management
    import comfy.sd

    from parallel_runtime.loading.comfyui_network import NetworkReader, NetworkWeights
    from parallel_runtime.loading.host_file import open_host_file
    from parallel_runtime.networks.comfyui.comfy_network import ComfyNetwork
    from parallel_runtime.networks.facts import describe_network

    _write(path, file, format)
    patcher = comfy.sd.load_diffusion_model(str(path))
    comfy.model_management.load_models_gpu([patcher])
    model, device = patcher.model, patcher.load_device
    opened = open_host_file(path)
    latent = opened.config.latent_format
    described = describe_network(opened.build(), opened.size, latent.latent_dimensions)
    dtype = None if opened.stored is None else model.get_dtype()
    held = NetworkWeights(NetworkReader(opened, described.data, dtype), torch.device(device))
    held.fill(lambda done, total: None)
    network = ComfyNetwork(held, described, latent, attention, model.get_dtype_inference())
    entered: list[Any] = []
    own = model.diffusion_model.forward

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        result = own(*args, **kwargs)
        entered.append((args, kwargs, result))
        return result

    found = []
    model.diffusion_model.forward = forward
    for rows in (1, 2):
        generator = torch.Generator().manual_seed(rows)
        sizes = (16, 5, 32, 24) if latent.latent_dimensions == 3 and "wan" in file else (16, 64, 48)
        sizes = (16, 1, 64, 48) if "qwen" in file else sizes
        if not gpu:
            sizes = (*sizes[:-2], sizes[-2] // 2, sizes[-1] // 2)
        width = {"flux": 48, "wan-t2v": 4096, "qwen-image": 3584, "z-image": 48}[file]
        given = {
            "c_crossattn": torch.randn(rows, 40, width, generator=generator).to(device),
            **({"y": torch.randn(rows, 768, generator=generator).to(device)} if file == "flux" else {}),
            **({"num_tokens": 40} if file == "z-image" else {}),
        }
        for call in range(_CALLS[device.type]):
            x = torch.randn(rows, *sizes, generator=generator).to(device)
            sigma = torch.full((rows,), 0.9 - 0.1 * call, device=device)
            entered.clear()
            with torch.inference_mode():  # as ComfyUI's executor has it
                model.apply_model(x, sigma, transformer_options={}, **given)
            ((args, kwargs, expected),) = entered
            more = {
                name: value for name, value in kwargs.items() if value is not None and name != "transformer_options"
            }
            x, timestep, *rest = args
            more |= dict(zip(("context",), rest, strict=False))
            ours = network.predict(x, timestep, more)
            assert ours.dtype == expected.dtype
            assert expected.isfinite().all()
            found.append([int((ours != expected).sum()), expected.numel()])
    return found


def _write(path: Path, file: str, format: str) -> None:
    from tests.comfyui_networks.files import FILES as SMALL
    from tests.comfyui_networks.formats import FORMATS, write
    from tests.comfyui_networks.large_files import LARGE_FILES
    from tests.comfyui_networks.write_files import header_of, tensors_of

    described = (SMALL | LARGE_FILES)[file]
    tensors = {name: tensor.bfloat16() for name, tensor in tensors_of(described).items()}
    if format in FORMATS:
        tensors = write(tensors, format)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, header_of(described))


if __name__ == "__main__":
    print(json.dumps(compare(0, 1, **json.loads(sys.argv[1]))))
