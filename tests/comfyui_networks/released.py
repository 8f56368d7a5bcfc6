"""A rank that has run ComfyUI's own network and was asked to let it go."""

from __future__ import annotations

import gc
from pathlib import Path

import torch
from torch import nn

from parallel_runtime.config import ParallelConfig
from parallel_runtime.engine.engine import Engine
from parallel_runtime.networks.comfyui.comfy_code import use_comfyui
from parallel_runtime.requests.requests import ComfyuiCode, ConditioningRef, Forward, Load, Release, tensor_name
from tests.parallel_runtime.staged_run import Quiet


def layers_with_weights(
    rank: int, world_size: int, comfyui: str, folder: str, weights: str
) -> dict[str, dict[str, int]]:
    """Layers that have weights, by class, {"while it is loaded", "after its release", "after another release"}."""
    device = torch.device("cpu")
    use_comfyui(comfyui, {"cpu": True})
    from safetensors.torch import save_file

    from tests.comfyui_networks.files import FILES
    from tests.comfyui_networks.write_files import tensors_of

    path = Path(folder) / "network.safetensors"
    save_file(tensors_of(FILES["longcat"]), path)
    engine = Engine(device, rank, world_size)
    config = ParallelConfig(devices="cpu:1", weights=weights)
    code = ComfyuiCode(comfyui, {"cpu": True}, "float32", False)

    def forward() -> None:
        given = {"context": torch.randn(1, 7, 3584)}
        tensors = {tensor_name(1, name): each for name, each in given.items()}
        tensors |= {"x": torch.randn(1, 16, 10, 12), "timestep": torch.full((1,), 0.7)}
        request = Forward("model", ConditioningRef(1, new=True, tensors=tuple(given)))
        with torch.no_grad():
            engine.prepare(request, {name: each.to("meta") for name, each in tensors.items()}, Quiet()).run(
                tensors, Quiet()
            )

    found = {}
    engine.prepare(Load("model", str(path), "float32", config.to_mapping(), 1, comfyui=code), {}, Quiet()).run(
        {}, Quiet()
    )
    forward()
    found["while it is loaded"] = _layers()
    for when in ("after its release", "after another release"):
        engine.prepare(Release("model"), {}, Quiet()).run({}, Quiet())
        found[when] = _layers()
        forward()
    return found


def _layers() -> dict[str, int]:
    gc.collect()
    found: dict[str, int] = {}
    for each in gc.get_objects():
        if isinstance(each, nn.Module) and any(
            own.device.type != "meta" and own.ndim > 1 for own in each.parameters(recurse=False)
        ):
            found[type(each).__name__] = found.get(type(each).__name__, 0) + 1
    return found
