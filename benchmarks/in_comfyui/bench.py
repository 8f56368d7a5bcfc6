"""What measurements share: the server, the models, the time that is left, and new pictures."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from .families import Family, family_of
from .graphs import SAMPLER, Graph, Picture, Way, decoded, plain
from .runs import MeasurementError, Run
from .server import Server

COMPARED_SEED = 7
"""The seed of the picture that every way makes once, so that latents can be compared."""

Found = dict[str, Any]
"""What a measurement has found so far, as JSON."""


@dataclass(frozen=True)
class Measure:
    """One measurement.

    Args:
        name: as the command line and the results have it.
        files: model files that it takes.
        bound: seconds that it may take.
        run: fills what it is given, bit by bit: what was found before a failure counts.
        devices: that it takes.
    """

    name: str
    files: tuple[str, ...]
    bound: float
    run: Callable[[Bench, Found], None]
    devices: int = 1


@dataclass
class Bench:
    """Given to every measurement.

    Args:
        server: which may be down.
        families: that files belong to.
        one, many: devices of Parallel Config: a single one, and all.
        cpu: memory is that of the machine.
        deadline: moment at which the running measurement must have ended.
        latents: name of a compared picture, and whether ComfyUI's own loader made it -> its file.
    """

    server: Server
    families: Mapping[str, Family]
    one: str
    many: str
    cpu: bool
    deadline: float = 0.0
    latents: dict[tuple[str, bool], Path] = field(default_factory=dict)
    _decoded: set[tuple[int, str]] = field(default_factory=set)
    _seeds: Any = field(default_factory=lambda: itertools.count(1000))

    def family(self, file: str) -> Family:
        """Of a file."""
        return family_of(file, self.families)

    def picture(self, file: str, steps: int | None = None, scale: int = 1, seed: int | None = None) -> Picture:
        """A picture that was never made before, unless a seed is given."""
        family = self.family(file).scaled(scale)
        return Picture(family, file, next(self._seeds) if seed is None else seed, steps or family.steps)

    def run(self, graph: Graph, previews: bool = False, during: Callable[[Run, int], None] | None = None) -> Run:
        """Run a prompt that must succeed.

        Raises:
            MeasurementError: it failed, was cancelled, or did not end in time.
        """
        run = self.server.run(graph, self.deadline, previews, during)
        if run.error or run.interrupted:
            raise MeasurementError(run.error or "cancelled")
        return run

    def make(self, way: Way, file: str, previews: bool = False, **changes: Any) -> Run:
        """Run the plain graph of a picture; see `picture` and `run`."""
        return self.run(plain(way, self.picture(file, **changes)), previews)

    def image(self, way: Way, file: str) -> Run:
        """Run the plain graph of a picture to a saved image, with the VAE loaded before."""
        while True:
            picture = self.picture(file)
            run = self.run(decoded(plain(way, picture), picture))
            if (key := (self.server.pid, picture.family.name)) in self._decoded:
                return run
            self._decoded.add(key)

    def distance(self, picture: str, way: Way, run: Run) -> float | None:
        """Of our latent of the compared picture from that of ComfyUI's own loader, relative to the norm of that.

        Args:
            picture: name of it, the same for every way.
            way: that made it.

        Returns:
            None where only one of the two was made yet.
        """
        if run.saved is None:
            return None
        own = not way.devices
        other = self.latents.get((picture, not own))
        self.latents[picture, own] = run.saved
        if other is None:
            return None
        ours, theirs = (
            load_file(path)["latent_tensor"].double() for path in ((other, run.saved) if own else (run.saved, other))
        )
        return float((ours - theirs).norm() / theirs.norm())

    def wait(self, seconds: float) -> None:
        """Do nothing for a while, within the deadline."""
        time.sleep(max(0.0, min(seconds, self.deadline - time.monotonic())))


def step_times(run: Run, node: str = SAMPLER) -> list[float]:
    """Milliseconds from step to step."""
    moments = run.steps(node)
    return [round(1000 * (later - earlier), 2) for earlier, later in itertools.pairwise(moments)]


def per_step(run: Run, node: str = SAMPLER) -> float:
    """Median of `step_times`.

    Raises:
        MeasurementError: fewer than three steps were reported.
    """
    times = step_times(run, node)
    if len(times) < 2:
        raise MeasurementError(f"only {len(times) + 1} steps were reported")
    return round(statistics.median(times), 2)


def mean_step(run: Run, node: str = SAMPLER) -> float:
    """Milliseconds per step from the first one's report to the latent, which no asynchronous launch can flatter."""
    moments = run.steps(node)
    return round(1000 * (run.sampled - moments[0]) / max(1, len(moments) - 1), 2)


def add(found: Found, what: str, run: Run) -> None:
    """One more row: what it was, seconds to the first step, seconds of the whole prompt."""
    row = {"what": what, "first step s": round(run.first_step, 2), "prompt s": round(run.seconds, 2)}
    found.setdefault("rows", []).append(row)
