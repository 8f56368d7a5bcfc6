"""From the queue to the first step: of a fresh server, after an unload, after a killed rank, on other devices."""

from __future__ import annotations

import shutil
import time

from ..bench import Bench, Found
from ..graphs import Way
from ..process_tree import ranks
from ..runs import MeasurementError, Run


def add(found: Found, what: str, run: Run) -> None:
    """One more row: what it was, seconds to the first step, seconds of the whole prompt."""
    row = {"what": what, "first step s": round(run.first_step, 2), "prompt s": round(run.seconds, 2)}
    found.setdefault("rows", []).append(row)


def _head(bench: Bench, found: Found, file: str, way: Way) -> None:
    found |= {"kind": "start", "model": bench.family(file).described, "way": way.title, "gpus": way.gpus}


def fresh(bench: Bench, found: Found, file: str, way: Way, twice: bool) -> None:
    """First prompt of a fresh server with nothing compiled, if `twice` of a second one too, and the next prompt."""
    _head(bench, found, file, way)
    server = bench.server
    server.stop()
    shutil.rmtree(server.state, ignore_errors=True)
    found["server up s"] = [round(server.start(), 1)]
    add(found, "fresh server, nothing compiled before", bench.make(way, file))
    if twice:
        server.stop()
        found["server up s"].append(round(server.start(), 1))
        add(found, "fresh server, compiled before", bench.make(way, file))
    add(found, "next prompt", bench.make(way, file))


def comes_back(bench: Bench, found: Found, file: str, way: Way) -> None:
    """After Unload Models, and after a rank was killed between two prompts."""
    _head(bench, found, file, way)
    add(found, "as it was", bench.make(way, file))
    bench.server.api.free()
    bench.wait(3)
    add(found, "after unload", bench.make(way, file))
    add(found, "next prompt", bench.make(way, file))
    running = ranks(bench.server.pid)
    if not running:
        raise MeasurementError("no rank is running")
    running[-1].kill()
    bench.wait(2)
    add(found, "after a rank was killed", bench.make(way, file))
    add(found, "next prompt", bench.make(way, file))


def sequence(bench: Bench, found: Found, file: str, places: tuple[tuple[str, int], ...]) -> None:
    """Prompts on other devices and at other sizes in turn: (devices, factor of the size). None may hang."""
    _head(bench, found, file, Way(places[0][0]))
    for devices, scale in places:
        width, height = bench.family(file).scaled(scale).size
        began = time.monotonic()
        what = f"devices {devices} at {width} × {height}"
        try:
            run = bench.make(Way(devices), file, steps=4, scale=scale)
        except MeasurementError as error:
            raise MeasurementError(f"{what}, after {time.monotonic() - began:.0f} s: {error}") from error
        add(found, what, run)
