"""Several models: what a switch costs, two in one graph, two in every step."""

from __future__ import annotations

from ..bench import COMPARED_SEED, Bench, Found, per_step, step_times
from ..graphs import SAMPLER, SECOND, Way, dual_guider, two_experts
from .start import add


def turns(bench: Bench, found: Found, files: tuple[str, str], way: Way) -> None:
    """Prompts with one model and the other in turn, then with one: what a first step takes beyond a usual one."""
    names = " and ".join(bench.family(file).title for file in files)
    found |= {"kind": "start", "model": f"{names} in turn", "way": way.title, "gpus": way.gpus}
    turns_taken = [(file, f"{file}, {'first' if number == 0 else 'again'}") for number in range(4) for file in files]
    for file, what in [*turns_taken, *[(files[-1], f"{files[-1]}, no switch")] * 2]:
        run = bench.make(way, file)
        add(found, what, run)
        found["rows"][-1]["beyond a step ms"] = round(1000 * run.first_step - per_step(run), 1)


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


def two_in_a_step(bench: Bench, found: Found, files: tuple[str, str], way: Way) -> None:
    """Dual Model Guider: the negative prompt has a model of its own."""
    title = bench.family(files[0]).described
    found |= {"kind": "start", "model": f"two of {title}, in every step", "way": way.title, "gpus": way.gpus}
    for number in range(3):
        run = bench.run(dual_guider(way, bench.picture(files[0], steps=6, seed=_seed(number)), files[1]))
        add(found, "first" if number == 0 else "later", run)
        if number == 0:
            found["rows"][-1]["distance"] = bench.distance("dual model", way, run)
        found["rows"][-1]["steps ms"] = step_times(run)


def _seed(number: int) -> int | None:
    """The first prompt's latent is compared."""
    return COMPARED_SEED if number == 0 else None
