"""What each rank runs of the tests of one engine per rank: loads, samples, and what they tell."""

from __future__ import annotations

from typing import Any

import torch

from parallel_runtime import memory
from parallel_runtime.config import ParallelConfig
from parallel_runtime.engine import rank_state
from parallel_runtime.engine.engine import Engine
from parallel_runtime.errors import OutOfMemoryError
from parallel_runtime.networks.latent_patches import LatentPatch
from parallel_runtime.requests.conditioning import refer
from parallel_runtime.requests.requests import Load, Sample
from tests.parallel_runtime.staged_run import Quiet

CPU = torch.device("cpu")


def sample_tensors(steps: int = 4) -> tuple[Sample, dict[str, torch.Tensor]]:
    """A run of a tiny FLUX and its tensors, the same in every process."""
    generator = torch.Generator().manual_seed(3)
    given = {
        "context": torch.randn(1, 7, 64, generator=generator),
        "y": torch.randn(1, 32, generator=generator),
        "guidance": torch.full((1,), 3.5),
    }
    sigmas = torch.linspace(1, 0, steps + 1)
    branch, tensors = refer(1, given)
    tensors |= {"x": torch.randn(1, 16, 12, 6, generator=generator), "sigmas": sigmas, "timesteps": sigmas}
    return Sample("m", "euler", (branch,), 1.0), tensors


class _Loaded:
    """An engine with a model that is in stages, told that its ranks have these speeds."""

    def __init__(self, rank: int, world_size: int, path: str, speeds: list[float]):
        rank_state.compare_devices = lambda *_: (False, speeds)  # a GPU each would be measured
        self.engine, self.control = Engine(CPU, rank, world_size), Quiet()
        config = ParallelConfig(devices=f"cpu:{world_size}", pipe=world_size, patches=3)
        load = Load("m", path, "float32", config.to_mapping(), world_size)
        self.answer, _ = self.engine.prepare(load, {}, self.control).run({}, self.control)

    def prepare(self) -> Any:
        request, tensors = sample_tensors()
        meta = {name: tensor.to("meta") for name, tensor in tensors.items()}
        return self.engine.prepare(request, meta, self.control), tensors

    def sample(self) -> torch.Tensor | None:
        prepared, tensors = self.prepare()
        with torch.no_grad():
            return prepared.run(tensors, self.control)[1].get("latent")


def run_unlike_engine(rank: int, world_size: int, path: str, speeds: list[float]) -> dict[str, Any]:
    """A run of unlike ranks; then one that rank 1 alone has no room for."""
    loaded = _Loaded(rank, world_size, path, speeds)
    results: dict[str, Any] = {
        "owned": loaded.engine.residency.get("m").network.stages.owned,
        "says": loaded.answer.explanation,
        "told speeds": loaded.answer.machine.speeds,
        "sampled": loaded.sample(),
    }
    plain = memory.free_bytes
    memory.free_bytes = lambda device: 1000 if rank == 1 else plain(device)
    try:
        loaded.prepare()
    except OutOfMemoryError as error:
        results["refused"] = str(error)
    memory.free_bytes = plain
    results["afterwards"] = loaded.sample()
    return {name: result for name, result in results.items() if result is not None}


def measure_kept(run: Any) -> int:
    """The most bytes of keys and values that were kept when a run let them go."""
    most, plain = [0], LatentPatch.clear

    def clear(self: LatentPatch) -> None:
        most.append(sum(each.nbytes for each in self.kept))
        plain(self)

    LatentPatch.clear = clear  # type: ignore[method-assign]
    try:
        with torch.no_grad():
            run()
    finally:
        LatentPatch.clear = plain  # type: ignore[method-assign]
    return max(most)
