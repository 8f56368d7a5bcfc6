"""Seconds of VAE Decode: by ComfyUI's VAE, and by Parallel VAE on one GPU and on all."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from statistics import median

from ..bench import Bench, Found
from ..graphs import Graph, Way, link, node
from ..runs import MeasurementError
from ..server import PACK_ROOT
from ..vaes import VAES, vae_file

_TIMES = 11
_LAST = 5  # of them count: several GPUs replay from the fifth on what they recorded in the fourth


def vae(bench: Bench, found: Found, name: str, way: Way) -> None:
    """The first decode, the last ones' median, and how far its picture is from that of ComfyUI's VAE."""
    chosen = VAES[name]
    found |= {"kind": "vae", "model": chosen.described, "way": _title(way), "gpus": way.gpus}
    make_vaes(bench, (chosen.vae,))
    run = bench.run(_graph(vae_file(chosen.vae), way, chosen.small if bench.cpu else chosen.latent))
    decoded = [event for event in run.events if event["kind"] == "decoded"]
    if not decoded:
        raise MeasurementError("no picture was decoded")
    seconds = decoded[0]["seconds"]
    found["first s"] = round(seconds[0], 3)
    found["later ms"] = round(1000 * median(seconds[-_LAST:]), 1)
    found["network ms"] = round(1000 * median(decoded[0]["in_network"][-_LAST:]), 1)
    found["ms"] = [round(1000 * each, 1) for each in seconds]
    found["distance"] = decoded[0]["distance"]
    found["texts"] = run.texts


def make_vaes(bench: Bench, names: Sequence[str]) -> None:
    """Have the files of these VAEs.

    Raises:
        subprocess.SubprocessError: one could not be written.
    """
    folder = bench.server.base / "models" / "vae"
    if missing := [name for name in names if not (folder / vae_file(name)).exists()]:
        command = [sys.executable, "-m", "benchmarks.in_comfyui.vae_files"]
        command += ["--comfyui", str(bench.server.comfyui), "--folder", str(folder), *missing]
        subprocess.run(command, cwd=PACK_ROOT, check=True, timeout=200)


def _title(way: Way) -> str:
    return "Parallel VAE" if way.devices else "Load VAE"


def _graph(file: str, way: Way, latent: tuple[int, ...]) -> Graph:
    graph = {"vae": node("VAELoader", vae_name=file)}
    given = link("vae")
    if way.devices:
        graph["config"] = node("ParallelConfig", devices=way.devices)
        graph["parallel"] = node("ParallelVAE", vae=given, parallel_config=link("config"))
        given = link("parallel")
    return graph | {"decode": node("BenchmarkDecode", vae=given, shape=json.dumps(latent), times=_TIMES)}
