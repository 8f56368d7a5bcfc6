"""An artist's hour with the defaults: no Parallel Config, and one prompt after the other as they come to mind."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..bench import Bench, Found, mean_step, per_step
from ..families import ENDING
from ..graphs import BY_DEFAULT, Graph, Picture, Way, custom, plain, with_loras
from ..lora_files import write_lora
from ..runs import MeasurementError, Run, TimeLimit

MODEL, FLOAT8, LORA = "flux", "own-flux-fp8", "journey"
FILES = (MODEL, FLOAT8)
OURS, NATIVE = Way(BY_DEFAULT), Way()
EMPTY, FULL = "caches empty", "caches full"
_LONGEST = 120.0
"""Seconds for one prompt."""
_CANCEL_AT = 3
_CHOOSING = 4.0
"""Seconds for which an artist looks for a file."""


@dataclass(frozen=True)
class Turn:
    """One prompt.

    Args:
        size: parts of the family's own width and height.
        batch, cfg: of the picture; 0: the family's.
        lora: strength; 0: none.
        chosen: a file is looked for and chosen before, which takes a moment.
        freed: *Unload Models* and *Free model and node cache* are pressed before.
        cancelled: it is cancelled after some steps.
    """

    what: str
    file: str = MODEL
    size: tuple[float, float] = (1, 1)
    steps: int = 20
    batch: int = 1
    cfg: float = 0.0
    lora: float = 0.0
    chosen: bool = False
    freed: bool = False
    custom: bool = False
    cancelled: bool = False

    @property
    def graph(self) -> str:
        """Alike for prompts that one compilation serves."""
        return f"{self.file}, {'several rows' if self.batch > 1 or self.cfg > 1 else 'one row'}"

    @property
    def shape(self) -> str:
        """Alike for prompts whose steps are the same work."""
        width, height = self.size
        extras = f"{f', batch {self.batch}' if self.batch > 1 else ''}{f', CFG {self.cfg}' if self.cfg else ''}"
        return f"{self.file} {width:g} × {height:g}{extras}"


_LARGE, _SMALL, _TALL = (2, 2), (0.75, 0.75), (0.8125, 1.1875)
TURNS: Sequence[Turn] = (
    Turn("1024², first"),
    *(Turn("1024²"),) * 3,
    *(Turn("2048²", size=_LARGE, steps=8),) * 2,
    *(Turn("768²", size=_SMALL),) * 2,
    *(Turn("832 × 1216", size=_TALL),) * 2,
    *(Turn("batch 2", batch=2, steps=12),) * 2,
    *(Turn("CFG 3.5", cfg=3.5, steps=12),) * 2,
    Turn("LoRA on", lora=0.8, chosen=True),
    Turn("other strength", lora=0.5),
    Turn("LoRA off"),
    *(Turn("float8 file", file=FLOAT8),) * 2,
    Turn("the first again"),
    Turn("after /free", freed=True),
    Turn("again"),
    Turn("cancelled", steps=200, cancelled=True),
    Turn("KSampler"),
    Turn("SamplerCustomAdvanced", custom=True),
)
"""The same for every way; a size, a batch and a file have a second prompt, by which steps are judged."""


def fresh(bench: Bench, found: Found, emptied: bool) -> None:
    """The journey by Parallel Loader in a fresh server, whose folder of compiled graphs is emptied before, or kept."""
    bench.server.stop()
    if emptied:
        shutil.rmtree(bench.server.state, ignore_errors=True)
    found["server up s"] = round(bench.server.start(), 1)
    play(bench, found, OURS, TURNS)


def native(bench: Bench, found: Found) -> None:
    """The journey by Load Diffusion Model, in the server that ran it by Parallel Loader."""
    bench.server.api.free()
    bench.server.api.unload_pools()
    bench.wait(2)
    play(bench, found, NATIVE, TURNS)


def best(bench: Bench, found: Found) -> None:
    """Every shape with a Parallel Config that compiles before the first step: what its steps are held against."""
    shapes = {turn.shape: turn for turn in reversed(TURNS) if not (turn.lora or turn.cancelled or turn.freed)}
    for turn in reversed(shapes.values()):
        play(bench, found, Way(bench.many, compile="off" if bench.cpu else "on"), (turn,))


def play(bench: Bench, found: Found, way: Way, turns: Sequence[Turn]) -> None:
    """Run prompts in turn. One that fails is a row that says so, and the others go on.

    Raises:
        TimeLimit: one did not end.
    """
    folder = bench.server.base / "models"
    write_lora(folder / "diffusion_models" / f"{MODEL}{ENDING}", folder / "loras" / f"{LORA}{ENDING}")
    rows = found.setdefault("rows", [])
    found |= {"kind": "journey", "way": way.title}
    for turn in turns:
        rows.append(row := {"what": turn.what, "graph": turn.graph, "shape": turn.shape, "error": ""})
        if turn.chosen:
            bench.wait(_CHOOSING)
        if turn.freed:
            bench.wait(1)  # ComfyUI's worker hears of it only while it waits for a prompt
            bench.server.api.free()
            bench.wait(1)
        try:
            _play(bench, row, way, turn)
        except TimeLimit as error:
            row["error"] = str(error)
            raise
        except MeasurementError as error:
            row["error"] = str(error)


def _play(bench: Bench, row: dict[str, Any], way: Way, turn: Turn) -> None:
    graph = _graph(bench, way, turn)
    deadline = min(bench.deadline, time.monotonic() + _LONGEST)
    cancelled: list[float] = []

    def cancel(run: Run, reported: int) -> None:
        if reported >= _CANCEL_AT and not cancelled:
            cancelled.append(time.monotonic())
            bench.server.api.interrupt()

    run = bench.server.run(graph, deadline, during=cancel if turn.cancelled else None)
    if run.error:
        raise MeasurementError(run.error)
    if run.interrupted != turn.cancelled:
        raise MeasurementError("cancelled by nobody" if run.interrupted else "it was cancelled, and ran to its end")
    row |= {"first step s": round(run.first_step, 2), "prompt s": round(run.seconds, 2)}
    if cancelled:
        row["ended after s"] = round(run.ended - cancelled[0], 2)
    else:
        row |= {"ms": per_step(run), "ms mean": mean_step(run)}


def _graph(bench: Bench, way: Way, turn: Turn) -> Graph:
    family = bench.family(turn.file)
    width, height = (round(length * part) for length, part in zip(family.size, turn.size, strict=True))
    family = replace(family, size=(width, height), cfg=turn.cfg or family.cfg)
    steps = family.steps if bench.cpu and not turn.cancelled else turn.steps
    picture = Picture(family, turn.file, bench.picture(turn.file).seed, steps, turn.batch)
    graph = custom(way, picture) if turn.custom else plain(way, picture)
    return with_loras(graph, [(f"{LORA}{ENDING}", turn.lora)] if turn.lora else [])
