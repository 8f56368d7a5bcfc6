"""A rank whose compiler process makes the graphs of a ComfyUI network."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from parallel_runtime.acceleration.pulse import Pulse
from parallel_runtime.acceleration.swap import Graphs
from parallel_runtime.config import ParallelConfig, ParallelPlan
from parallel_runtime.engine.opened_host import OpenedHost
from parallel_runtime.mesh.mesh import build_mesh
from parallel_runtime.requests.requests import ComfyuiCode, Load

CALLS = {"krea-2": (16, 320), "lens": (128, 96)}
"""Channels and width of the text; one class of blocks is the fewest kernels to compile. Lens has modulation layers."""


def run_until_swapped(rank: int, world_size: int, comfyui: str, folder: str, quantised: bool) -> dict[str, Any]:
    """{"first", "swapped": predictions, "plain": of the network as it is, "found", "made": graphs}."""
    torch.set_grad_enabled(False)
    family = "krea-2" if quantised else "lens"
    path = _write(Path(folder) / f"{rank}.safetensors", comfyui, family, quantised)
    device = torch.device("cpu")
    code = ComfyuiCode(comfyui, {"cpu": True}, "" if quantised else "float32", False)
    opened = OpenedHost.open(
        Load("model", str(path), "float32", ParallelConfig().to_mapping(), 1, comfyui=code), device
    )
    held = opened.allocate(None, device).hold()
    held.fill(lambda done, total: None)
    mesh = build_mesh(ParallelPlan(ulysses=world_size), rank, world_size)
    assert mesh is not None
    channels, width = CALLS[family]
    call = torch.randn(1, channels, 10, 12), torch.tensor([0.7]), {"context": torch.randn(1, 7, width)}
    if world_size > 1:
        for each in (call[0], call[2]["context"]):
            torch.distributed.broadcast(each, 0)

    def structure(compiles: bool) -> Any:
        network = opened.structure(held, None, ("auto", compiles, compiles), None, None, Pulse(device)).transformer
        network.set_mesh(mesh)
        return network

    plain, network = structure(False), structure(True)
    found: dict[str, Any] = {"plain": plain.predict(*call), "first": network.predict(*call)}
    deadline = time.monotonic() + 780
    while network._compilation.compiled is None and time.monotonic() < deadline:
        time.sleep(0.2)
        found["swapped"] = network.predict(*call)
    graphs = Graphs.so_far()
    refused = network._run_block.__self__.methods.refused
    return found | {"found": graphs.found + graphs.lowered, "made": graphs.made, "refused": len(refused)}


def _write(path: Path, comfyui: str, family: str, quantised: bool) -> Path:
    from parallel_runtime.networks.comfyui.host_code import use_comfyui

    use_comfyui(comfyui, {"cpu": True})
    from tests.comfyui_networks.files import FILES
    from tests.comfyui_networks.formats import write
    from tests.comfyui_networks.write_files import tensors_of

    tensors = tensors_of(FILES[family])
    save_file(write(tensors, "float8_e4m3fn") if quantised else tensors, path)
    return path
