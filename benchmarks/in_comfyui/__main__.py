"""Numbers out of a real ComfyUI, which this starts itself, beside ComfyUI's own loader in the same server.

    python -m benchmarks.in_comfyui --comfyui ~/ComfyUI --set quick            # FLUX.1, one and two GPUs: 6 minutes
    python -m benchmarks.in_comfyui --comfyui ~/ComfyUI --set families         # FLUX.2 klein, SD3.5, SDXL, Wan 1.3B
    python -m benchmarks.in_comfyui --comfyui ~/ComfyUI --set host_networks --only own-flux  # ComfyUI's own networks
    python -m benchmarks.in_comfyui --comfyui ~/ComfyUI --set controlnet       # FLUX.1 with a Union ControlNet
    python -m benchmarks.in_comfyui --comfyui ~/ComfyUI --set journey          # what defaults give; fails if too little
    python -m benchmarks.in_comfyui --comfyui ~/ComfyUI --set vae              # seconds of VAE Decode, by Parallel VAE
    python -m benchmarks.in_comfyui --comfyui ~/ComfyUI --set prompts --only klein  # seconds to the saved file, by part
    python -m benchmarks.in_comfyui --comfyui ~/ComfyUI --set all --out FOLDER # everything: most of an hour
    python -m benchmarks.in_comfyui --comfyui ~/ComfyUI --set quick --cpu      # tiny models: does the command work?

Makes model files with random weights at real size where they are missing, and deletes them at its end. Every
measurement has a time limit; one that fails, or hangs, becomes a line with its reason, and the others go on. Writes
results-SET.json after each measurement, and table-SET.md, which is also the end of what is printed. ComfyUI must have
its requirements in the Python that --python names, by default this one, with the environment (PYTHONPATH) of this
command.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from workers.driver import list_gpus

from .bench import Bench, Measure
from .files import ALL, FileStore, all_tiny
from .journey_verdict import faults
from .process_tree import dump_stacks
from .report import describe_machine, tables, write
from .runs import TimeLimit
from .server import Server, default_python
from .sets import SECONDS, SETS, SPARE, USUAL, plan

_SHORTEST = 15.0
"""Seconds; a measurement is not begun with less time left."""
_SLOWER = 3
"""How much longer measurements may take with --cpu."""
_LOG_BYTES = 4_000_000


class Session:
    """One run of the command: a server, the files, and the results so far."""

    def __init__(self, options: argparse.Namespace, folder: Path, measures: list[Measure]):
        self._options = options
        self._ends = time.monotonic() + options.seconds
        arguments = [*(["--cpu"] if options.cpu else []), *options.comfyui_arguments]
        comfyui = options.comfyui.expanduser().resolve()
        self.server = Server(
            comfyui=comfyui,
            base=folder,
            python=options.python,
            arguments=arguments,
            compile=options.compile,
        )
        families = all_tiny() if options.cpu else ALL
        spare = 2.0 if options.cpu else SPARE.get(options.set, 2.0)
        self._files = FileStore(folder / "models" / "diffusion_models", families, options.cpu, comfyui, spare)
        one, many = options.places
        self._bench = Bench(self.server, families, one, many, options.cpu)
        self._plan = measures
        self._results: list[dict[str, Any]] = []
        self._machine: dict[str, Any] = {}
        self._began = time.monotonic()

    def run(self) -> tuple[str, list[str]]:
        """Measure everything; return the tables, and what a journey fell short of."""
        self._prepare()
        for number, measure in enumerate(self._plan):
            later = [file for following in self._plan[number:] for file in following.files]
            self._add(measure, self._measure(measure, later))
        short = faults(self._results, not self._options.cpu) if self._options.set == "journey" else []
        return tables(self._machine, self._results), short

    def _prepare(self) -> None:
        """Start the server while the first files are written."""
        names = [file for measure in self._plan for file in measure.files]
        first = self._files.fitting(names)
        self._say(f"{len(self._plan)} measurements; writing {', '.join(first)} while ComfyUI starts")
        writer = threading.Thread(target=self._write_first, args=(first,))
        writer.start()
        try:
            up = self.server.start()
            self._say(f"ComfyUI answered after {up:.1f} s")
        finally:
            writer.join()
        stats = self.server.api.system_stats()
        self._machine = describe_machine(self.server.log.read_text(errors="replace"), stats)

    def _write_first(self, files: list[str]) -> None:
        try:
            self._say(f"files written after {self._files.make(files, (), self._left()):.1f} s")
        except subprocess.SubprocessError as error:
            self._say(f"files: {error}")  # the measurement that needs one tries again, and then fails

    def _measure(self, measure: Measure, later: list[str]) -> dict[str, Any]:
        began = time.monotonic()
        found: dict[str, Any] = {"name": measure.name, "error": ""}
        if self._left() < _SHORTEST:
            return found | {"error": "no time was left"}
        try:
            self._files.make(measure.files, later, self._left())
            if not self.server.running:
                self.server.start()
            bound = measure.bound * (_SLOWER if self._options.cpu else 1)
            self._bench.deadline = time.monotonic() + min(bound, self._left())
            measure.run(self._bench, found)
        except TimeLimit as error:
            found["error"] = str(error)
            dump_stacks(self.server.pid, self._options.out / "stacks.txt")
            self._recover()
        except Exception as error:  # noqa: BLE001 - process border: one measurement's fault is a line in the table
            found["error"] = f"{type(error).__name__}: {error}"
            self._recover()
        found["took s"] = round(time.monotonic() - began, 1)
        return found

    def _recover(self) -> None:
        """Have an idle server for the next measurement: this one, or none, so that it is started anew."""
        if not self.server.running or not self.server.settle(15):
            self.server.stop()

    def _add(self, measure: Measure, found: dict[str, Any]) -> None:
        self._results.append(found)
        self._say(json.dumps({key: value for key, value in found.items() if key not in ("texts", "steps ms")}))
        write(self._options.out / f"results-{self._options.set}.json", self._machine, self._results)
        text = tables(self._machine, self._results)
        (self._options.out / f"table-{self._options.set}.md").write_text(text)

    def keep_logs(self) -> None:
        """Copy the ends of ComfyUI's log and of the pools' to the results."""
        pools = sorted(self.server.pool_logs.glob("*"), key=lambda path: path.stat().st_mtime)
        whole = b"".join(f"--- {path.name}\n".encode() + path.read_bytes() for path in pools if path.is_file())
        (self._options.out / f"pools-{self._options.set}.log").write_bytes(whole[-_LOG_BYTES:])
        if self.server.log.exists():
            log = self.server.log.read_bytes()[-_LOG_BYTES:]
            (self._options.out / f"comfyui-{self._options.set}.log").write_bytes(log)

    def _left(self) -> float:
        return self._ends - time.monotonic()

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:.0f} s] {text}", flush=True)


def _devices(options: argparse.Namespace) -> tuple[str, str]:
    """One device, and all, as Parallel Config names them."""
    if options.cpu:
        return "cpu:1", "cpu:2"
    if not options.devices:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # which ComfyUI counts from 0
        options.devices = ",".join(str(index) for index, _ in enumerate(visible.split(",") if visible else list_gpus()))
    return options.devices.partition(",")[0], options.devices


def read_options() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    path = os.environ.get("COMFYUI_PATH", "~/ComfyUI")
    parser.add_argument("--comfyui", type=Path, default=Path(path), help="its folder")
    parser.add_argument("--set", choices=[*SETS, "all"], default="quick")
    parser.add_argument("--families", type=lambda text: text.split(","), default=[], help=", ".join(ALL))
    parser.add_argument("--only", default="", metavar="TEXT", help="measurements with this expression in their name")
    parser.add_argument("--list", action="store_true", help="print the names of the measurements, and end")
    parser.add_argument("--devices", default="", help="GPUs, the first of which is the single one; by default all")
    parser.add_argument("--out", type=Path, default=Path("in-comfyui-output"), help="folder for the results")
    parser.add_argument("--base", type=Path, help="base directory of the server; by default one that is deleted after")
    parser.add_argument(
        "--seconds", type=float, help=f"for everything; by default {USUAL:.0f}, quick {SECONDS['quick']:.0f}"
    )
    parser.add_argument("--compile", choices=["default", "on", "off"], help="of Parallel Config; with --cpu off")
    parser.add_argument("--cpu", action="store_true", help="tiny models on CPUs: tries the command")
    parser.add_argument("--python", default=default_python(), help="that runs ComfyUI")
    parser.add_argument("comfyui_arguments", nargs="*", help="after --: more arguments of ComfyUI's")
    options = parser.parse_args()
    if options.seconds is None:
        options.seconds = 4000.0 if options.set == "all" else SECONDS.get(options.set, USUAL)
        options.seconds *= _SLOWER if options.cpu else 1
    if options.compile is None:
        options.compile = "off" if options.cpu else "default"
    options.out = options.out.resolve()
    options.places = _devices(options)
    return options


def main() -> None:
    """Run, print, write."""
    options = read_options()
    one, many = options.places
    chosen = plan(options.set, one, many, tuple(options.families))
    measures = [measure for measure in chosen if re.search(options.only, measure.name)]
    if options.list:
        print("\n".join(f"{measure.name} ({measure.bound:.0f} s)" for measure in measures))
        return
    # The time limit of whoever runs us should not leave processes on the GPUs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    options.out.mkdir(parents=True, exist_ok=True)
    folder = options.base.resolve() if options.base else Path(tempfile.mkdtemp(prefix="in-comfyui-"))
    session = Session(options, folder, measures)
    try:
        text, short = session.run()
    finally:
        session.server.stop()
        session.keep_logs()
        if not options.base:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"\n{text}")
    if short:
        sys.exit("\n".join(["The journey fell short:", *short]))


if __name__ == "__main__":
    main()
