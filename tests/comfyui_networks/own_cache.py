"""What ranks do in the tests of networks that keep something on themselves: HiDream O1, as a rank holds it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from parallel_runtime.config import ParallelPlan
from parallel_runtime.loading.comfyui_network import NetworkReader, NetworkWeights
from parallel_runtime.mesh.mesh import build_mesh, single_rank_mesh
from parallel_runtime.networks.comfyui.comfy_code import use_comfyui
from parallel_runtime.networks.comfyui.comfy_network import ComfyNetwork
from parallel_runtime.networks.facts import describe_network


class _Held(NetworkWeights):
    """As a rank holds it, without a file."""

    def __init__(self, module: torch.nn.Module, data: Any):
        file: Any = SimpleNamespace(path="", identity=())
        super().__init__(NetworkReader(file, data, torch.float32), torch.device("cpu"))
        self.prepare(module)
        self._network, self.here = module, True


def apart(rank: int, world_size: int, comfyui: str) -> dict[str, Any]:
    """{what happened before: difference of a call over all ranks from the network in one process, over its scale}."""
    use_comfyui(comfyui, {"cpu": True})
    from tests.comfyui_networks.catalogue import TINY

    torch.set_grad_enabled(False)
    calls = TINY["hidream o1"]().calls["kept"]
    rest = {name: value for name, value in calls.items() if name not in ("x", "timestep")}
    positive, negative = rest, rest | {"input_ids": rest["input_ids"].flip(1)}
    whole, alone = build_mesh(ParallelPlan(ulysses=world_size), rank, world_size), single_rank_mesh()

    def network() -> ComfyNetwork:
        module = TINY["hidream o1"]().network
        described = describe_network(module, 0, 2)
        return ComfyNetwork(_Held(module, described.data), described, None, "auto", torch.float32)

    def run(network: ComfyNetwork, mesh: Any, arguments: dict[str, Any]) -> torch.Tensor:
        network.set_mesh(mesh)
        return network.predict(calls["x"], calls["timestep"], dict(arguments))

    def difference(network: ComfyNetwork, arguments: dict[str, Any], by: float = 1.0) -> float:
        module = TINY["hidream o1"]().network
        for parameter in module.language_model.parameters():
            parameter.data *= by
        expected = module(calls["x"], calls["timestep"], **arguments)
        return float((run(network, whole, arguments) - expected).abs().max() / expected.abs().max())

    found = {}
    ours = network()
    found["nothing"] = difference(ours, positive)
    found["the same call"] = difference(ours, positive)
    ours = network()
    if rank == 0:
        run(ours, alone, positive)
    found["a call on one rank"] = difference(ours, positive)
    ours = network()
    run(ours, alone, positive if rank == 0 else negative)
    found["a branch on each rank"] = difference(ours, positive)
    ours = network()
    run(ours, whole, positive)
    if rank == 0:
        ours.forget_runs()
    found["one rank let go"] = difference(ours, positive)
    for parameter in ours._held.network.language_model.parameters():
        parameter.data *= 0.8
    ours._held.settle(("a LoRA", ""))
    found["other weights"] = difference(ours, positive, by=0.8)
    return found
