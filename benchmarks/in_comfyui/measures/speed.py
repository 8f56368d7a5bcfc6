"""How long a step and a whole prompt take, and how far the latent is from that of ComfyUI's own loader."""

from __future__ import annotations

import time

from ..bench import COMPARED_SEED, Bench, Found, mean_step, per_step, step_times
from ..graphs import Way
from ..runs import Run

_LATER = 10
"""Prompts at most after the first one until the times stand still."""
_STILL = 0.02
_FEW = 2
"""Prompts of `short_speed` after the first: the first of them records CUDA graphs."""
_LONG = 15.0
"""Seconds; prompts that take longer are run once only after the first one."""


def _first(bench: Bench, found: Found, file: str, way: Way) -> Run:
    """The first prompt of a model one way."""
    found |= {"kind": "speed", "model": bench.family(file).described, "way": way.title, "gpus": way.gpus}
    first = bench.make(way, file, seed=COMPARED_SEED)
    found |= {
        "first prompt s": round(first.seconds, 2),
        "first step s": round(first.first_step, 2),
        "distance": bench.distance(file, way, first),
        "texts": first.texts,
    }
    return first


def speed(bench: Bench, found: Found, file: str, way: Way) -> None:
    """One model one way: first prompt, later prompts until their times stand still, with previews, and to an image."""
    _first(bench, found, file, way)
    before = 0.0
    for number in range(_LATER):
        later = bench.make(way, file)
        now = per_step(later)
        found |= {
            "ms": now,
            "ms mean": mean_step(later),
            "later prompt s": round(later.seconds, 2),
            "later prompts": number + 1,
            "steps ms": step_times(later),
        }
        if later.seconds > _LONG or (before and abs(now - before) < _STILL * before):
            break
        before = now
    if later.seconds < _LONG and time.monotonic() + 2 * later.seconds < bench.deadline:
        shown = bench.make(way, file, previews=True)
        found |= {"ms previews": per_step(shown), "shown prompt s": round(shown.seconds, 2)}
    if bench.family(file).vae is not None and time.monotonic() + 6 * later.seconds < bench.deadline:
        found["later image s"] = round(bench.image(way, file).seconds, 2)


def short_speed(bench: Bench, found: Found, file: str, way: Way) -> None:
    """As `speed`, with few prompts: the first, and two later ones."""
    found["first steps ms"] = step_times(_first(bench, found, file, way))
    for number in range(_FEW):
        later = bench.make(way, file)
        found |= {
            "ms": per_step(later),
            "ms mean": mean_step(later),
            "later prompt s": round(later.seconds, 2),
            "later prompts": number + 1,
            "steps ms": step_times(later),
        }
        if not way.devices or time.monotonic() + 2 * later.seconds > bench.deadline:
            break
