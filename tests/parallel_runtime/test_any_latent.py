"""A latent of any size runs as on one rank, or is refused in PREPARE on every rank: never in RUN, where it costs the
pool."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel_runtime.config import ParallelConfig
from parallel_runtime.engine.engine import Engine
from parallel_runtime.errors import ParallelError
from parallel_runtime.requests.conditioning import refer
from parallel_runtime.requests.requests import Forward, Load, Request, Sample
from tests.families import STAGED, Family
from tests.parallel_runtime.staged_run import Quiet
from tests.ranks import run_ranks
from tests.tiny_flux import tiny_config
from tests.tiny_model import find_by_name, write_diffusers_folder

SIZES = tuple(itertools.product((1, 2), range(1, 6), range(1, 6)))
"""Frames (of video), height, width."""
CPU = torch.device("cpu")
RANKS = 4
WISHES: list[dict[str, int]] = [{}, {"ulysses": 2, "ring": 2}, {"pipe": 2, "ulysses": 2}, {"pipe": 2}]
"""What the configuration sets; the rest is `auto`."""


def families() -> dict[str, Family]:
    """Those with stages, SD3 without layers that attend to the picture alone, and FLUX.1."""
    sd3 = STAGED["SD3.5 medium"]
    flux = {"context": torch.linspace(-2, 2, 192).view(1, 3, 64), "y": torch.ones(1, 32), "guidance": torch.ones(1)}
    heads = {"num_attention_heads": 2, "num_layers": 1, "num_single_layers": 2}
    return STAGED | {
        "SD3": Family("sd3", {**sd3.config, "dual_attention_layers": ()}, sd3.calls),
        "FLUX.1": Family("flux", tiny_config(**heads), ({"x": torch.ones(1, 16, 4, 4), **flux},)),
    }


class _Pair:
    """An engine of this rank among others, and one alone, with the same model."""

    def __init__(self, rank: int, world_size: int):
        self.control, self.rank = Quiet(), rank
        self.together, self.alone = Engine(CPU, rank, world_size), Engine(CPU, 0, 1)

    def load(self, path: Path, wish: dict[str, int]) -> None:
        for engine, degrees in ((self.together, wish), (self.alone, {})):
            ranks = engine.world_size
            config = ParallelConfig(devices=f"cpu:{ranks}", **degrees)
            self._run(engine, Load("m", str(path), "float32", config.to_mapping(), ranks), {})

    def error(self, request: Request, tensors: dict[str, torch.Tensor]) -> float | None:
        """Of the ranks' result beside that of one, relative; 0 where this rank has none, None where it was refused."""
        try:
            result = self._run(self.together, request, tensors)
        except _RefusedError:
            return None
        if not result:
            return 0.0
        expected = self._run(self.alone, request, tensors)
        (one,), (other,) = result.values(), expected.values()
        return float((one - other).abs().max() / other.abs().max())

    def _run(self, engine: Engine, request: Request, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        meta = {name: tensor.to("meta") for name, tensor in tensors.items()}
        try:
            prepared = engine.prepare(request, meta, self.control)
        except ParallelError as refusal:
            raise _RefusedError(str(refusal)) from refusal
        with torch.no_grad():
            return prepared.run(tensors, self.control)[1]


class _RefusedError(Exception):
    """In PREPARE."""


def make_requests(family: Family, size: tuple[int, ...]) -> tuple[Forward, Sample, dict[str, torch.Tensor]]:
    """One call and a short run of a family on a latent of that size (height, width), after a video's frames."""
    shape = family.call["x"].shape
    frames = size[:1] if len(shape) == 5 else ()
    x = torch.randn(1, shape[1], *frames, *size[1:], generator=torch.Generator().manual_seed(sum(size)))
    given = {name: value for name, value in family.call.items() if name not in ("x", "timestep")}
    sigmas = torch.tensor([1.0, 0.5, 0.0])
    text, tensors = refer(1, given)
    tensors |= {"x": x, "timestep": torch.tensor([0.5]), "sigmas": sigmas, "timesteps": sigmas}
    return Forward("m", text), Sample("m", "euler", (text,), 1.0), tensors


def run_all(rank: int, world_size: int, folder: str, examples: int) -> dict[str, Any]:
    """Run by `run_ranks`: all ranks draw the same sizes."""
    pair, found, errors = _Pair(rank, world_size), Counter(), {}
    for name, family in families().items():
        for wish in WISHES:
            if "pipe" in wish and not find_by_name(family.spec).cut:
                continue
            pair.load(Path(folder) / name, wish)
            for size in random.Random(f"{name} {wish}").sample(SIZES, examples):
                *requests, tensors = make_requests(family, size)
                for request in requests:
                    # Stages change pixels once they no longer work in turn.
                    exact = "pipe" not in wish or isinstance(request, Forward)
                    error = pair.error(request, tensors)
                    found["refused" if error is None else "ran"] += 1
                    if error is not None and not error < (1e-4 if exact else math.inf):
                        errors[f"{name} {wish} {size} {type(request).__name__}"] = error
    return {"errors": errors, **found}


@pytest.mark.long_but_for("2")
@pytest.mark.slow
@pytest.mark.parametrize("examples", [2, 6])
def test_a_latent_of_any_size_runs_as_on_one_rank_or_is_refused_before_any_rank_computes(tmp_path, examples):
    for name, family in families().items():
        write_diffusers_folder(find_by_name(family.spec), tmp_path / name, family.config)
    results = run_ranks(RANKS, f"{__name__}:run_all", {"folder": str(tmp_path), "examples": examples})
    assert results[0]["errors"] == {}
    assert {(each["ran"], each["refused"]) for each in results} == {(results[0]["ran"], results[0]["refused"])}
    assert results[0]["ran"] > results[0]["refused"] > 0
