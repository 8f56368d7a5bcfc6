"""Two models in one graph, each for half of the steps."""

from __future__ import annotations

from ..bench import COMPARED_SEED, Bench, Found, add, step_times
from ..graphs import SAMPLER, SECOND, Way, two_experts


def experts(bench: Bench, found: Found, files: tuple[str, str], way: Way) -> None:
    """Two experts in one graph, each for half of the steps."""
    picture = bench.family(files[0])
    found |= {"kind": "start", "model": f"two of {picture.described}, in turn", "way": way.title, "gpus": way.gpus}
    for number in range(3):
        run = bench.run(two_experts(way, bench.picture(files[0], seed=_seed(number)), files[1]))
        add(found, "first" if number == 0 else "later", run)
        if number == 0:
            found["rows"][-1]["distance"] = bench.distance("two experts", way, run)
        high, low = run.steps(SAMPLER), run.steps(SECOND)
        found["rows"][-1] |= {
            "steps ms": step_times(run, SAMPLER) + step_times(run, SECOND),
            "from one to the other s": round(low[0] - high[-1], 2),
        }
        if run.seconds > 100:
            break


def _seed(number: int) -> int | None:
    """The first prompt's latent is compared."""
    return COMPARED_SEED if number == 0 else None
