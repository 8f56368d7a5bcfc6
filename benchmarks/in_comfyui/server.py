"""A ComfyUI of its own: started on a base directory, driven through /prompt, ended with all that it started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import websocket

from tests.host.find_host import find_gguf_pack
from workers.leftovers import end_tree

from .api import Api
from .defaults import fill
from .graphs import Graph
from .runs import MeasurementError, Run, TimeLimit, take_in

PACK_ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 150
_FOLDERS = (
    "models/diffusion_models",
    "models/vae",
    "models/text_encoders",
    "custom_nodes",
    "input",
    "output",
    "temp",
    "user",
    "front",
    "pool",
)
_END_SECONDS = 20


class Server:
    """One ComfyUI process, which can be started anew.

    Args:
        comfyui: its folder.
        base: folder that becomes its base directory; logs and caches lie there too.
        python: that runs it.
        arguments: more of ComfyUI's, such as --cpu.
        compile: see `graphs.fill`.
    """

    def __init__(self, *, comfyui: Path, base: Path, python: str, arguments: list[str], compile: str):
        self.base = base
        self.log = base / "comfyui.log"
        self.pool_logs = base / "pools"
        self.state = base / "state"
        self.api = Api()
        self.comfyui = comfyui
        self._python = python
        self._arguments = arguments
        self._compile = compile
        self._options: tuple[str, ...] = ()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: Any = None
        self._client = ""
        for folder in _FOLDERS:
            (base / folder).mkdir(parents=True, exist_ok=True)
        (base / "front" / "index.html").write_text("<!doctype html>")
        packs = {"parallel-dit": PACK_ROOT, "benchmark-pack": Path(__file__).parent / "pack"}
        if gguf := find_gguf_pack(comfyui):
            packs["ComfyUI-GGUF"] = gguf
        for name, path in packs.items():
            if not (link := base / "custom_nodes" / name).is_symlink():
                link.symlink_to(path)

    @property
    def pid(self) -> int:
        """Of ComfyUI's process."""
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """It was started, and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> float:
        """Start it and connect; return the seconds until it answered.

        Raises:
            MeasurementError: it did not come up.
        """
        began = time.monotonic()
        port = _free_port()
        self.api.address = f"127.0.0.1:{port}"
        environment = os.environ | {
            "PARALLEL_DIT_LOGS": str(self.pool_logs),
            "XDG_STATE_HOME": str(self.state),
            "TMPDIR": str(self.base / "pool"),  # pools of other sessions on this machine have theirs elsewhere
            **({"OMP_NUM_THREADS": "1"} if "--cpu" in self._arguments else {}),
            # It runs in another folder than this process.
            "PYTHONPATH": os.pathsep.join(
                os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path
            ),
        }
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._command(), f"--port={port}"],
                cwd=self.comfyui,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        while not self.api.answers():
            if not self.running:
                raise MeasurementError(f"ComfyUI ended with {self._process.returncode}: {self.log_tail(12)}")
            if time.monotonic() - began > START_SECONDS:
                raise MeasurementError(f"ComfyUI did not answer within {START_SECONDS} s: {self.log_tail(12)}")
            time.sleep(0.1)
        self._client = uuid.uuid4().hex
        self._socket = websocket.create_connection(f"ws://{self.api.address}/ws?clientId={self._client}")
        return time.monotonic() - began

    def keep_options(self, options: tuple[str, ...]) -> None:
        """Have it run with these options of ComfyUI's beside its own: it is started anew if it runs with others."""
        if options != self._options or not self.running:
            self.stop()
            self._options = options
            self.start()

    def stop(self) -> None:
        """End it and everything that it started."""
        if self._process is None:
            return
        if self._socket is not None:
            self._socket.close()
        if self._process.poll() is None:
            end_tree(self._process.pid, _END_SECONDS)
        self._process.wait()
        self._process, self._socket = None, None

    def run(
        self,
        graph: Graph,
        deadline: float,
        previews: bool = False,
        during: Callable[[Run, int], None] | None = None,
    ) -> Run:
        """Queue a prompt and follow it to its end.

        Args:
            deadline: moment at which waiting ends.
            during: called about ten times a second with the run and the number of messages so far about steps.

        Raises:
            TimeLimit: it did not end in time; it may still be running.
            MeasurementError: ComfyUI refused the prompt, or ended.
        """
        filled = fill(graph, self.api.nodes(graph), self._compile)
        posted = time.monotonic()
        run = Run(self.api.queue(filled, self._client, previews), posted)
        reported = 0
        self._socket.settimeout(0.1)
        while True:
            if time.monotonic() > deadline:
                raise TimeLimit(f"the prompt did not end within {deadline - posted:.0f} s")
            if not self.running:
                raise MeasurementError(f"ComfyUI ended: {self.log_tail(12)}")
            if during is not None:
                during(run, reported)
            try:
                message = self._socket.recv()
            except websocket.WebSocketTimeoutException:
                continue
            kind = take_in(run, message)
            reported += kind == "progress"
            if kind == "end":
                break
        run.ended = time.monotonic()
        run.events = self.api.events(run.prompt)
        run.saved = self._saved(run)
        return run

    def run_queued(self, graphs: Sequence[Graph], deadline: float) -> float:
        """Queue prompts together; return the seconds until the last has ended.

        Raises:
            TimeLimit: they did not end in time.
            MeasurementError: ComfyUI refused one, or one left nothing.
        """
        filled = [fill(graph, self.api.nodes(graph), self._compile) for graph in graphs]
        posted = time.monotonic()
        prompts = [self.api.queue(graph, "", False) for graph in filled]
        while not self.api.idle():
            if time.monotonic() > deadline:
                raise TimeLimit(f"the prompts did not end within {deadline - posted:.0f} s")
            time.sleep(0.01)
        seconds = time.monotonic() - posted
        if not all(self.api.outputs(prompt) for prompt in prompts):
            raise MeasurementError("one of the prompts left nothing")
        return seconds

    def settle(self, seconds: float) -> bool:
        """Cancel whatever runs and wait until nothing does; False when it does not end."""
        deadline = time.monotonic() + seconds
        try:
            self.api.interrupt()
            while time.monotonic() < deadline:
                if self.api.idle():
                    return True
                time.sleep(0.2)
        except OSError:
            pass  # it does not even answer
        return False

    def log_tail(self, lines: int) -> str:
        """End of ComfyUI's console."""
        return " | ".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _command(self) -> list[str]:
        return [
            self._python,
            str(self.comfyui / "main.py"),
            "--listen=127.0.0.1",
            "--disable-api-nodes",
            f"--base-directory={self.base}",
            f"--front-end-root={self.base / 'front'}",
            "--database-url=sqlite:///:memory:",
            *self._arguments,
            *self._options,
        ]

    def _saved(self, run: Run) -> Path | None:
        for shown in self.api.outputs(run.prompt).values():
            for file in shown.get("latents", []):
                return self.base / "output" / file["subfolder"] / file["filename"]
        return None


def default_python() -> str:
    """The Python that runs this."""
    return sys.executable


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
