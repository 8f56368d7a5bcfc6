"""Every class of the table, with a batch that is cut between its rows."""

from __future__ import annotations

import copy
from typing import Any

import torch

from parallel_runtime.config import ParallelPlan
from parallel_runtime.denoising.predict import Call, own_calls
from parallel_runtime.mesh.mesh import Layout
from parallel_runtime.networks.comfyui.comfy_code import use_comfyui
from parallel_runtime.networks.tables.comfyui import find_network
from parallel_runtime.requests.conditioning import Conditioning
from parallel_runtime.requests.trees import map_tensors


def compare(rank: int, world_size: int, comfyui: str) -> dict[str, Any]:
    """{"differences": {"network, call": of a batch cut for two and three ranks, from the whole one}}.

    Args:
        rank, world_size: one rank plays all of them: nothing is sent.
    """
    use_comfyui(comfyui, {"cpu": True})
    from tests.comfyui_networks.catalogue import TINY
    from tests.comfyui_networks.tiny import noise

    torch.set_grad_enabled(False)

    def three(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim < 2 or tensor.shape[0] != 1:
            return tensor
        rows = tensor.repeat(3, *[1] * (tensor.ndim - 1))
        if tensor.is_floating_point():
            for row in (1, 2):
                rows[row] += 0.1 * noise(*tensor.shape[1:], seed=row).to(tensor.dtype)
        return rows

    differences: dict[str, float] = {}
    for name, make in TINY.items():
        network, calls = (made := make()).network, made.calls
        known = find_network(type(network))
        assert known is not None
        for each, arguments in calls.items():
            x, timestep = arguments["x"], arguments["timestep"]
            if known.rows_together or not isinstance(x, torch.Tensor):
                continue
            given = {key: value for key, value in arguments.items() if key not in ("x", "timestep")}
            if x.shape[0] == 1:
                x, given = three(x), map_tensors(given, three)
                timestep = timestep.repeat(3) if timestep.ndim == 1 else three(timestep)
            whole = Call(x, timestep, Conditioning({"transformer_options": {}, **given}))
            try:
                expected = _run(network, whole)
            except RuntimeError:  # it takes such inputs for one row alone
                continue
            for ranks in (2, 3):
                layouts = [Layout(ParallelPlan(data=ranks), place, {"data": place, "cfg": 0}) for place in range(ranks)]
                found = torch.cat([_run(network, own) for layout in layouts for own in own_calls([whole], layout)])
                differences[f"{name}, {each}, {ranks}"] = float((found - expected).abs().max() / expected.abs().max())
    return {"differences": differences}


def _run(network: torch.nn.Module, one: Call) -> torch.Tensor:
    arguments = copy.deepcopy(dict(one.conditioning.arguments))  # some networks write into them
    return network(one.x.clone(), one.timestep.clone(), **arguments)
