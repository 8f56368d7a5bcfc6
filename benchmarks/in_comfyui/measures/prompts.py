"""Seconds of a whole prompt, from the queue to the saved file, by part: first, with another seed, with another text;
and of each of several that are queued together."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

from ..bench import Bench, Found
from ..encoders import ENCODERS
from ..graphs import SAMPLER, SECOND, Graph, Way
from ..journey_verdict import NATIVE
from ..runs import MeasurementError, Run
from ..server import PACK_ROOT
from ..whole_prompts import PARTS, SMALL, WHOLE, Whole, part_of, text, whole_graph
from .vae import make_vaes

_STILL = 0.02
"""Later prompts whose seconds differ by less than this part are alike."""
_ENCODER_SECONDS = 150
_QUEUED = 6  # prompts of other seeds, queued together


def prompts(bench: Bench, found: Found, file: str, way: Way, parallel_vae: bool) -> None:
    """Prompts of one family one way.

    What ComfyUI and the pools hold is let go before, and the pools end, so that the first prompt is that of a morning;
    with Parallel VAE it goes on where the way without it ended, and its first prompt is not reported.
    """
    whole = WHOLE[file]
    family = replace(bench.family(file), cfg=1.0)
    steps = family.steps if bench.cpu else whole.steps
    described = _described(whole, family.described, steps, bench.cpu)
    said = {"model": described, "way": _title(way, parallel_vae), "gpus": way.gpus}
    found |= {"kind": "prompts", "file": file, **said}
    if not parallel_vae:
        bench.server.api.free()
        bench.server.api.stop_pools()
        bench.wait(2)
    make_vaes(bench, (whole.vae_of(bench.cpu),))
    make_encoders(bench, whole)
    words = 0

    def run(what: str) -> Run:
        picture = replace(bench.picture(file), family=family, steps=steps)
        graph = whole_graph(whole, way, picture, text(words), parallel_vae, bench.cpu)
        done = bench.run(graph)
        row = {"what": what, "all s": round(done.seconds, 3), **seconds_of_parts(graph, done)}
        rows = [each for each in found.get("rows", ()) if each["what"] != what]
        found["rows"] = [*rows, row]
        found["texts"] = done.texts
        return done

    first = run("first")
    before, left = first.seconds, whole.again
    while left and time.monotonic() + 2 * before < bench.deadline:
        now = run("other seed").seconds
        left = 0 if abs(now - before) < _STILL * before else left - 1
        before = now
    words = 1
    run("other text")
    pictures = [replace(bench.picture(file), family=family, steps=steps) for _ in range(_QUEUED)]
    graphs = [whole_graph(whole, way, each, text(words), parallel_vae, bench.cpu) for each in pictures]
    seconds = bench.server.run_queued(graphs, bench.deadline) / _QUEUED
    found["rows"].append({"what": f"each of {_QUEUED} queued", "all s": round(seconds, 3)})
    if parallel_vae:
        found["rows"] = [row for row in found["rows"] if row["what"] != "first"]


def seconds_of_parts(graph: Graph, run: Run) -> dict[str, float]:
    """Seconds of a prompt by part.

    A node's seconds are from ComfyUI's message that it begins to the next one's. What a sampler did before its first
    step (weights to the GPU, ranks, what is compiled) counts as load: a step's length is that of those after the first.

    Raises:
        MeasurementError: a sampler reported fewer than two steps.
    """
    parts = dict.fromkeys(PARTS, 0.0)
    for name, began, end in run.spans():
        if name in (SAMPLER, SECOND):
            steps = run.steps(name)
            if len(steps) < 2:
                raise MeasurementError(f"only {len(steps)} steps of {name} were reported")
            stepping = min(end - began, (end - steps[0]) * len(steps) / (len(steps) - 1))
            parts["steps"] += stepping
            parts["load"] += end - began - stepping
        elif name in graph:
            parts[part_of(graph[name]["class_type"])] += end - began
    return {name: round(seconds, 3) for name, seconds in parts.items()}


def make_encoders(bench: Bench, whole: Whole) -> None:
    """Have the files of its encoders, and no others: the disk is small."""
    names = SMALL if bench.cpu else whole.encoders
    folder = bench.server.base / "models" / "text_encoders"
    wanted = {ENCODERS[name].file for name in names}
    for path in folder.iterdir():
        if path.name not in wanted:
            path.unlink()
    if missing := [name for name in names if not (folder / ENCODERS[name].file).exists()]:
        command = [sys.executable, "-m", "benchmarks.in_comfyui.encoder_files"]
        command += ["--comfyui", str(bench.server.comfyui), "--folder", str(folder), *missing]
        subprocess.run(command, cwd=PACK_ROOT, check=True, timeout=_ENCODER_SECONDS)


def _title(way: Way, parallel_vae: bool) -> str:
    if not way.devices:
        return NATIVE
    return "Parallel Loader, Parallel VAE" if parallel_vae else "Parallel Loader"


def _described(whole: Whole, described: str, steps: int, small: bool) -> str:
    encoders = ", ".join(SMALL if small else whole.encoders)
    return f"{described.removesuffix(', CFG')}, {steps} steps, text by {encoders}{', left aside' if small else ''}"
