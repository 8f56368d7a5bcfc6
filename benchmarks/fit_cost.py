"""Predicted step times beside measured ones, of FLUX.1-dev's size: does the cost model still hold, and where not?

    python -m benchmarks.fit_cost                          # benchmarks/results/*.json
    python -m benchmarks.fit_cost some-folder/*.json

Needs no GPU. Read are the results of `compare`, those of two commands before it, and rows like these in any file:

    {"rows": [{"plan": "stages 4 (4 patches, 1 warm-up step)", "size": 512, "ms": 21.5, "p2p": false}]}

with `compiled` (true) and `steps` of the run (28) where they are others. A step of `flux_step.json`, which is of an
older engine, is left out where another file has the same one: so its eager steps stay. How to refit is said in
parallel_runtime/planning/cost_constants.py.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from parallel_runtime.config import AXES, ParallelPlan
from parallel_runtime.planning.cost import Cost, PlannedStep
from parallel_runtime.requests.facts import GIB, HOST_MEMORY, NVLINK, known_gpu

from .flux_facts import FLUX_DEV, flux_request

RESULTS = Path(__file__).resolve().parent / "results"
_OLDER = "flux_step.json"
_EAGER_RIVAL = "ours-eager"
_STEP_AT = re.compile(r"step_(\d+)_ms")


@dataclass(frozen=True)
class Measured:
    """One measured step.

    Args:
        source: name of its file.
        gpu: text that names it.
        p2p: the GPUs reach one another's memory; else NCCL_P2P_DISABLE was set.
        steps: of the run, over which a warm-up is spread.
        milliseconds: per step, warm-up steps of PipeFusion averaged in.
    """

    source: str
    gpu: str
    plan: ParallelPlan
    size: int
    compiled: bool
    p2p: bool
    steps: int
    milliseconds: float

    def what(self) -> tuple[ParallelPlan, int, bool, bool]:
        """What was measured, for telling whether two measured the same."""
        return self.plan, self.size, self.compiled, self.p2p

    def predicted(self) -> float:
        """Milliseconds per step, by the cost model with the constants of this GPU and link."""
        return 1e3 * self._cost().seconds

    def predicted_bytes(self) -> int:
        """Memory of the fullest rank, by the same model."""
        return self._cost().bytes

    def _cost(self) -> Cost:
        machine = known_gpu(self.gpu, 0, NVLINK if self.p2p else HOST_MEMORY)
        request = replace(flux_request(self.size), steps=self.steps)
        return PlannedStep(self.plan, FLUX_DEV, request, machine, self.compiled).cost()

    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted() / self.milliseconds - 1


def read_results(paths: Iterable[Path]) -> list[Measured]:
    """Every step of ours in result files.

    Rows of other engines, and of stages without CUDA graphs, are left out; so are steps of `_OLDER` that another file
    has too.
    """
    steps = [step for path in paths for step in _steps_of(path)]
    newer = {step.what() for step in steps if step.source != _OLDER}
    return [step for step in steps if step.source != _OLDER or step.what() not in newer]


def parse_plan(text: str) -> ParallelPlan:
    """Read what `str(plan)` says; "pipe 4" is as good as "stages 4"."""
    found = dict(re.findall(r"([a-z]+) (\d+)", text.replace("stages", "pipe")))
    degrees = {axis: int(found[axis]) for axis in AXES if axis in found}
    patches, warm_up = (re.search(rf"(\d+) {word}", text) for word in ("patch", "warm-up"))
    if patches is not None and warm_up is not None:
        degrees |= {"patches": int(patches[1]), "warmup_steps": int(warm_up[1])}
    return ParallelPlan(**degrees)


def _steps_of(path: Path) -> Iterator[Measured]:
    content = json.loads(path.read_text())
    if not isinstance(content, dict) or not isinstance(content.get("rows"), list):
        return
    for row in content["rows"]:
        known = _plan_of(row)
        if known is None or "reason" in row or not row.get("graphs", True):
            continue
        plan, compiled = known
        shared = {"plan": plan, "compiled": row.get("compiled", compiled), "p2p": row.get("p2p", True)}
        for size, milliseconds in _times_of(row):
            yield Measured(
                path.name,
                str(content.get("machine", "H200")),
                size=size,
                steps=row.get("steps", 28),
                milliseconds=milliseconds,
                **shared,
            )


def _plan_of(row: Mapping[str, Any]) -> tuple[ParallelPlan, bool] | None:
    """A row's plan, and whether it was compiled; None where it is of another engine."""
    if "plan" in row:
        return parse_plan(row["plan"]), True
    if found := re.fullmatch(r"Parallel DiT, (\d+) GPUs?(, compiled)?", row.get("engine", "")):
        return ParallelPlan(ulysses=int(found[1])), bool(found[2])
    ranks = row.get("ranks", 1)
    plans = {  # as benchmarks.rivals splits a picture
        "ours": {"ulysses": ranks},
        _EAGER_RIVAL: {"ulysses": ranks},
        "ours-picture": {"ulysses": ranks},
        "ours-ring": {"ring": ranks},
        "ours-pipefusion": {"pipe": ranks, "patches": ranks, "warmup_steps": 1},
        "ours-pipefusion-ulysses": {"pipe": 2, "ulysses": max(1, ranks // 2), "patches": 2, "warmup_steps": 1},
    }
    degrees = plans.get(row.get("rival", ""))
    return (ParallelPlan(**degrees), row["rival"] != _EAGER_RIVAL) if degrees is not None else None


def _times_of(row: Mapping[str, Any]) -> Iterator[tuple[int, float]]:
    """(size, milliseconds) of a row: one, or one for each size in its keys."""
    for key, value in row.items():
        if found := _STEP_AT.fullmatch(key):
            yield int(found[1]), value
    milliseconds = row.get("ms", row.get("ms_per_step"))
    if milliseconds is not None:
        yield row["size"], milliseconds


def table(measured: Iterable[Measured]) -> str:
    """Markdown for docs/choosing-a-plan.md."""
    lines = [
        "| plan | size | compiled | links | ms per step, measured | predicted | error | from |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for step in measured:
        links = "one GPU" if step.plan.world_size == 1 else "P2P" if step.p2p else "no P2P"
        lines.append(
            f"| {step.plan} | {step.size}² | {'yes' if step.compiled else 'no'} | {links} | {step.milliseconds:.1f} | "
            f"{step.predicted():.1f} | {100 * step.error():+.1f} % | {step.source} |"
        )
    return "\n".join(lines)


def memory_table() -> str:
    """What the fullest of several stages is predicted to need."""
    lines = ["| stages | size | weights | keys and values | all, estimated |", "|---|---|---|---|---|"]
    for stages in (2, 4, 8):
        for size in (1024, 2048):
            plan = ParallelPlan(pipe=stages, patches=stages, warmup_steps=1)
            cost = PlannedStep(plan, FLUX_DEV, flux_request(size), known_gpu("H200", 0, NVLINK), True).cost()
            sizes = (cost.weight_bytes, cost.buffer_bytes, cost.bytes)
            lines.append(f"| {stages} | {size}² | {' | '.join(f'{each / GIB:.1f} GiB' for each in sizes)} |")
    return "\n".join(lines)


def main() -> None:
    """Print the tables."""
    paths = [Path(name) for name in sys.argv[1:]] or sorted(RESULTS.glob("*.json"))
    print(f"{table(read_results(paths))}\n\nMemory of the fullest GPU:\n\n{memory_table()}")


if __name__ == "__main__":
    main()
