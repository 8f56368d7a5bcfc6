"""What ranks do in the tests of predictions: a network that returns another type than its input's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from parallel_runtime.config import ParallelPlan
from parallel_runtime.denoising.predict import Call, Predictor
from parallel_runtime.errors import PeerFailedError
from parallel_runtime.mesh.mesh import build_mesh
from parallel_runtime.requests.conditioning import Conditioning


def predict(rank: int, world_size: int) -> dict[str, Any]:
    """{"rows, type": whether this rank has what the network gives for so many rows}."""
    mesh = build_mesh(ParallelPlan(cfg=2, data=world_size // 2), rank, world_size)
    found = {}
    for rows in (1, 2, 4):
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            network: Any = SimpleNamespace(
                rows_together=False,
                predict=lambda x, timestep, arguments, dtype=dtype: 2 * x.to(dtype),
                output_shape=lambda shape: shape,
                set_mesh=lambda mesh: None,
                rows_go_apart=lambda rows, begins: False,
            )
            x = torch.arange(6.0 * rows).reshape(rows, 6).bfloat16()
            (output,) = Predictor(network, mesh)([Call(x, torch.zeros(rows), Conditioning({}))])
            found[f"{rows}, {dtype}"] = output.dtype == dtype and torch.equal(output, 2 * x.to(dtype))
    return found


def predict_what_one_fails_at(rank: int, world_size: int) -> dict[str, Any]:
    """{"first": what this rank got of a call whose last branch the network does not take, "second": of one it does}."""
    mesh = build_mesh(ParallelPlan(cfg=world_size), rank, world_size)

    def compute(x: torch.Tensor, timestep: torch.Tensor, arguments: Any) -> torch.Tensor:
        if (x < 0).any():
            raise ValueError("a branch awry")
        return 2 * x

    network: Any = SimpleNamespace(
        rows_together=False,
        predict=compute,
        output_shape=lambda shape: shape,
        set_mesh=lambda mesh: None,
        rows_go_apart=lambda rows, begins: False,
    )
    found = {}
    for name, last in (("first", -1.0), ("second", 1.0)):
        calls = [Call(torch.full((1, 6), value), torch.zeros(1), Conditioning({})) for value in (1.0, last)]
        try:
            outputs = Predictor(network, mesh)(calls)
        except (ValueError, PeerFailedError) as error:
            found[name] = type(error).__name__
        else:
            found[name] = str([float(output.mean()) for output in outputs])
    return found
