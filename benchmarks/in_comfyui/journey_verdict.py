"""What a journey proves: its table, and what it falls short of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .measures.journey import EMPTY, FULL

Result = Mapping[str, Any]
NATIVE, BEST = "Load Diffusion Model", "compile on"
FIRST_STEP = {EMPTY: 20.0, FULL: 12.0}
"""Seconds from the queue to the first step of a server's first prompt; with empty caches, also of the first prompt of
another file and of several rows, which compile their graphs once on a machine."""
SLOWER = 1.03
"""Steps from the second prompt of a shape on, over the best of that shape in the same server; and the best of a server
over the best of all. A card's clocks differ by 2 % from one server to the next, minutes later."""
SERVERS = {EMPTY: (EMPTY,), FULL: (FULL, BEST)}
"""What Parallel Loader plays in one server."""


def journeys(results: Sequence[Result]) -> dict[str, list[dict[str, Any]]]:
    """Rows of those measurements that are journeys, by name."""
    return {result["name"]: list(result.get("rows", ())) for result in results if result.get("kind") == "journey"}


def step(row: Mapping[str, Any]) -> float:
    """Milliseconds: the median leaves out a step that waited, the mean does not mind when messages of steps come."""
    return float(min(row["ms"], row.get("ms mean", row["ms"])))


def best_steps(told: Mapping[str, Sequence[dict[str, Any]]], ways: Iterable[str]) -> dict[str, float]:
    """Shape -> the least milliseconds a step that any prompt of these journeys took."""
    found: dict[str, float] = {}
    for row in (row for way in ways for row in told.get(way, ()) if "ms" in row):
        found[row["shape"]] = min(step(row), found.get(row["shape"], step(row)))
    return found


def faults(results: Sequence[Result], speeds: bool) -> list[str]:
    """What was promised and did not come, one sentence each; none where all is well.

    Args:
        speeds: times are judged too, which on a CPU with tiny models say nothing.
    """
    said = [f"{result['name']}: {result['error']}" for result in results if result.get("error")]
    told = journeys(results)
    said += [
        f"{name}, prompt {number} ({row['what']}) failed: {row['error']}"
        for name, rows in told.items()
        for number, row in enumerate(rows, 1)
        if row["error"]
    ]
    said += [f"{name} was not played" for name in (EMPTY, FULL, NATIVE, BEST) if not told.get(name)]
    if speeds:
        best, native = best_steps(told, (EMPTY, FULL, BEST)), told.get(NATIVE, [])
        for name, limit in FIRST_STEP.items():
            own = best_steps(told, SERVERS[name])
            said += [
                f"{name}, {shape}: {ms} ms a step at best, elsewhere {best[shape]}"
                for shape, ms in own.items()
                if ms > SLOWER * best[shape]
            ]
            said += [f"{name}, {fault}" for fault in _slow(told.get(name, []), native, own, limit, name == EMPTY)]
    return said


def _slow(
    rows: Sequence[dict[str, Any]],
    native: Sequence[dict[str, Any]],
    best: Mapping[str, float],
    limit: float,
    compiles: bool,
) -> list[str]:
    said = []
    seen: set[str] = set()
    graphs: set[str] = set()
    for number, row in enumerate(rows, 1):
        theirs = native[number - 1].get("prompt s") if number <= len(native) else None
        title = f"prompt {number} ({row['what']})"
        if "ms" not in row:
            continue
        if number == 1 or (compiles and row["graph"] not in graphs):
            if row["first step s"] > limit:
                said.append(f"{title}: its first step came after {row['first step s']} s, not {limit:g}")
        elif theirs is not None and row["prompt s"] > theirs:
            said.append(f"{title}: {row['prompt s']} s, Load Diffusion Model {theirs}")
        graphs.add(row["graph"])
        if row["shape"] in seen and step(row) > SLOWER * best[row["shape"]]:
            said.append(f"{title}: {step(row)} ms a step, the best {best[row['shape']]}")
        seen.add(row["shape"])
    return said


def table(results: Sequence[Result]) -> tuple[list[str], list[list[Any]]]:
    """Heads and rows: seconds to the first step and in all, and milliseconds a step, by each way."""
    told = journeys(results)
    best = best_steps(told, (EMPTY, FULL, BEST))
    ways = [name for name in (EMPTY, FULL, NATIVE) if name in told]
    heads = ["prompt", *(f"{name}: {part}" for name in ways for part in ("first step, s", "all, s", "ms")), "best ms"]
    longest = max((told[name] for name in ways), key=len, default=[])
    rows = []
    for place, row in enumerate(longest):
        cells = [told[name][place] if place < len(told[name]) else {} for name in ways]
        values = [cell.get(key) for cell in cells for key in ("first step s", "prompt s", "ms")]
        rows.append([f"{place + 1} {row['what']}", *values, best.get(row["shape"])])
    return heads, rows
