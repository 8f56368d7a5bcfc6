"""What two ranks that share one GPU run of the tests of weights that come block by block."""

from __future__ import annotations

from typing import Any

import torch

from parallel_runtime.engine.engine import Engine
from parallel_runtime.requests.requests import Forward, Release
from tests.parallel_runtime.streamed_run import KINDS, PoolRank, flux_tensors, staying

_CALLS = 4
"""The second is recorded, the third tried, the fourth a replay."""


def compare(rank: int, world_size: int, path: str, folder: str, device: str) -> dict[str, Any]:
    """{what: whether it holds}: each kind of weights against whole ones, on a plan that gives each rank a picture; also
    where the first rank keeps two blocks more than the other, or all."""
    pool = PoolRank(rank, world_size, folder, torch.device(device))
    found: dict[str, Any] = {}
    expected: torch.Tensor | None = None
    unlike = [(f"{kind} {more} more", kind, (more, 0)) for kind in KINDS for more in (2, 4)]
    for weights, kind, held in [*((kind, kind, ()) for kind in ("whole", *KINDS)), *unlike]:
        with staying(1, held):
            pool.load(weights, path, weights=kind, data=world_size)
        outputs = [_forward(pool, weights) for _ in range(_CALLS)]
        expected = outputs[0] if expected is None else expected
        found[weights] = all(torch.equal(output, expected) for output in outputs)
        found[f"{weights} recorded"] = count_recordings(pool.engine, weights)
        if weights == "dealt":
            shared = pool.weights(weights).shared
            found["on the device"] = shared.dealer.on_device
        pool.run(Release(weights))
        found[f"{weights} gone"] = not pool.weights(weights).here
        found[f"{weights} back"] = all(torch.equal(_forward(pool, weights), expected) for _ in range(_CALLS))
    return found


def _forward(pool: PoolRank, name: str) -> torch.Tensor:
    reference, tensors = flux_tensors(rows=pool.ranks)
    if pool.device.type != "cpu":  # in the model's type, as ComfyUI sends them; the timestep stays
        tensors = {key: each if key == "timestep" else each.to(torch.bfloat16) for key, each in tensors.items()}
    return pool.run(Forward(name, reference), tensors)[1]["output"].cpu()


def count_recordings(engine: Engine, name: str) -> int:
    """How many forwards of a model are recorded; 0 on a CPU."""
    recorded: Any = engine.residency.get(name).network._recorded  # type: ignore[union-attr]
    if recorded is None:
        return 0
    over = [each.kinds for each in recorded._over.values()] if hasattr(recorded, "_over") else [recorded._kinds]
    return sum(kind.replay is not None for kinds in over for kind in kinds.values())
