"""What each rank runs of the tests of one engine per rank: loads, samples, and what they tell."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.share_blocks import share_blocks
from parallel_runtime import memory
from parallel_runtime.config import ParallelConfig, ParallelPlan
from parallel_runtime.engine import rank_state
from parallel_runtime.engine.engine import Engine
from parallel_runtime.errors import OutOfMemoryError
from parallel_runtime.mesh.links import build_links
from parallel_runtime.mesh.mesh import build_mesh
from parallel_runtime.networks.absent_blocks import keep_blocks
from parallel_runtime.networks.diffusers.registry import find_by_name
from parallel_runtime.networks.stale_keys import StaleKeys
from parallel_runtime.pipefusion.kept import kept_bytes
from parallel_runtime.pipefusion.runner import StageRunner
from parallel_runtime.pipefusion.stage import Stage
from parallel_runtime.planning.describe import describe_model
from parallel_runtime.requests.conditioning import Conditioning
from parallel_runtime.requests.requests import ConditioningRef, Load, Sample, tensor_name
from tests.families import Family, build
from tests.parallel_runtime.staged_families import run_family
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
    tensors = {tensor_name(1, key): tensor for key, tensor in given.items()}
    tensors |= {"x": torch.randn(1, 16, 12, 6, generator=generator), "sigmas": sigmas, "timesteps": sigmas}
    branch = ConditioningRef(1, new=True, tensors=tuple(given))
    return Sample("m", "euler", (branch,), 1.0, 0, "cpu"), tensors


class _Loaded:
    """An engine with a model that is in stages, told that its ranks have these speeds."""

    def __init__(self, rank: int, world_size: int, path: str, speeds: list[float] | None):
        rank_state.measure_speeds = lambda *_: speeds  # a GPU each would be measured
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


def run_unlike_engines(rank: int, world_size: int, path: str, speeds: list[float]) -> dict[str, Any]:
    """The run of equal ranks and of unlike ones; then one that rank 1 alone has no room for."""
    results: dict[str, Any] = {}
    for name, given in (("alike", None), ("unlike", speeds)):
        loaded = _Loaded(rank, world_size, path, given)
        results[f"{name} owned"] = loaded.engine.residency.get("m").transformer.owned
        results[f"{name} says"] = loaded.answer.explanation
        results[f"{name} told speeds"] = loaded.answer.machine.speeds
        results[name] = loaded.sample()
    plain = memory.free_bytes
    memory.free_bytes = lambda device: 1000 if rank == 1 else plain(device)
    try:
        loaded.prepare()
    except OutOfMemoryError as error:
        results["refused"] = str(error)
    memory.free_bytes = plain
    results["afterwards"] = loaded.sample()
    return {name: result for name, result in results.items() if result is not None}


def run_and_count_kept(rank: int, world_size: int, family: dict[str, Any], plans: list[dict[str, int]]) -> Any:
    """[[predicted, allocated] bytes of keys and values] of this rank, for each plan."""
    spec, model = find_by_name(family["spec"]), Family(family["spec"], family["config"], (make_call(family["call"]),))
    counted = []
    for degrees in plans:
        plan = ParallelPlan(**degrees)
        mesh, links = build_mesh(plan, rank, world_size), build_links(plan, rank)
        module = build(model)
        facts = describe_model(spec, family["config"], shapes_of(module), 4)
        owned = share_blocks(module, spec, plan.pipe)[mesh.coordinate["pipe"]]
        stage = Stage(module, spec, keep_blocks(module, spec, owned), mesh, "auto", False)
        x, extras = model.call["x"], {name: value for name, value in model.call.items() if name != "x"}
        parts = StageRunner(stage, links, [Conditioning(extras)], x, 3, keep=False)._parts
        kept = measure_kept(partial(run_family, model, stage, links))
        counted.append([kept_bytes(facts, owned, mesh, parts), kept])
    return {"counted": counted}


def make_call(shapes: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    """Random tensors of these shapes."""
    return {name: torch.randn(shape, generator=torch.Generator().manual_seed(1)) for name, shape in shapes.items()}


def shapes_of(module: Any) -> dict[str, tuple[int, ...]]:
    """Of all parameters, as a file's header tells them."""
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def measure_kept(run: Any) -> int:
    """The most bytes of keys and values that were kept when a run let them go."""
    most, plain = [0], StaleKeys.clear

    def clear(self: StaleKeys) -> None:
        layers = [layer for layers in self._kept.values() for layer in layers]
        most.append(sum(tensor.nbytes for layer in layers for tensor in layer))
        plain(self)

    StaleKeys.clear = clear
    try:
        with torch.no_grad():
            run()
    finally:
        StaleKeys.clear = plain
    return max(most)
