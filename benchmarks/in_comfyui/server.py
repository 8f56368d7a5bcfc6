"""A ComfyUI of its own: started on a base directory, driven through /prompt, ended with all that it started."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import websocket

from workers.processes import end_tree

from .graphs import Graph, fill
from .runs import MeasurementError, Run, TimeLimit, take_in

PACK_ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 150
_FOLDERS = (
    "models/diffusion_models",
    "models/diffusers",
    "models/vae",
    "custom_nodes",
    "input",
    "output",
    "temp",
    "user",
    "front",
    "pool",
)
_REPLY_SECONDS = 10
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

    def __init__(self, comfyui: Path, base: Path, python: str, arguments: list[str], compile: str):
        self.base = base
        self.log = base / "comfyui.log"
        self.pool_logs = base / "pools"
        self.state = base / "state"
        self._comfyui = comfyui
        self._python = python
        self._arguments = arguments
        self._compile = compile
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: Any = None
        self._address = ""
        self._infos: dict[str, Any] = {}
        for folder in _FOLDERS:
            (base / folder).mkdir(parents=True, exist_ok=True)
        (base / "front" / "index.html").write_text("<!doctype html>")
        for name, path in {"parallel-dit": PACK_ROOT, "benchmark-pack": Path(__file__).parent / "pack"}.items():
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
        self._address = f"127.0.0.1:{port}"
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
                cwd=self._comfyui,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        while not self._answers():
            if not self.running:
                raise MeasurementError(f"ComfyUI ended with {self._process.returncode}: {self.log_tail(12)}")
            if time.monotonic() - began > START_SECONDS:
                raise MeasurementError(f"ComfyUI did not answer within {START_SECONDS} s: {self.log_tail(12)}")
            time.sleep(0.1)
        self._client = uuid.uuid4().hex
        self._socket = websocket.create_connection(f"ws://{self._address}/ws?clientId={self._client}")
        return time.monotonic() - began

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
        content = {
            "prompt": fill(graph, self._nodes(graph), self._compile),
            "client_id": self._client,
            "extra_data": {"preview_method": "latent2rgb" if previews else "none"},
        }
        posted = time.monotonic()
        run = Run(self._post("/prompt", content)["prompt_id"], posted)
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
        run.events = self._get(f"/benchmark/events/{run.prompt}")
        run.saved = self._saved(run)
        return run

    def interrupt(self) -> None:
        """Cancel what is running."""
        self._post("/interrupt", {})

    def free(self) -> None:
        """What *Unload Models* and *Free model and node cache* do."""
        self._post("/free", {"unload_models": True, "free_memory": True})

    def system_stats(self) -> Any:
        """What ComfyUI says of itself and its machine."""
        return self._get("/system_stats")

    def settle(self, seconds: float) -> bool:
        """Cancel whatever runs and wait until nothing does; False when it does not end."""
        deadline = time.monotonic() + seconds
        try:
            self.interrupt()
            while time.monotonic() < deadline:
                queue = self._get("/queue")
                if not queue["queue_running"] and not queue["queue_pending"]:
                    return True
                time.sleep(0.2)
        except OSError:
            pass  # it does not even answer
        return False

    def processes(self) -> list[psutil.Process]:
        """Every process that ComfyUI has started."""
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def ranks(self) -> list[psutil.Process]:
        """The rank processes of all its pools."""
        return [process for process in self.processes() if is_rank(process)]

    def dump_stacks(self, path: Path) -> None:
        """Append the stacks of ComfyUI and all ranks to a file, where py-spy is installed."""
        if (tool := shutil.which("py-spy")) is None:
            return
        with path.open("a") as file:
            for pid in [self.pid, *(process.pid for process in self.processes())]:
                try:
                    text = subprocess.run([tool, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=10)
                except subprocess.TimeoutExpired:
                    continue
                file.write(f"--- {pid}\n{text.stdout}\n")

    def log_tail(self, lines: int) -> str:
        """End of ComfyUI's console."""
        return " | ".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _command(self) -> list[str]:
        return [
            self._python,
            str(self._comfyui / "main.py"),
            "--listen=127.0.0.1",
            "--disable-api-nodes",
            f"--base-directory={self.base}",
            f"--front-end-root={self.base / 'front'}",
            "--database-url=sqlite:///:memory:",
            *self._arguments,
        ]

    def _answers(self) -> bool:
        try:
            self._get("/system_stats")
        except OSError:
            return False
        return True

    def _nodes(self, graph: Graph) -> Mapping[str, Any]:
        for kind in {content["class_type"] for content in graph.values()} - set(self._infos):
            found = self._get(f"/object_info/{kind}")
            if kind not in found:
                raise MeasurementError(f"this ComfyUI has no node {kind}")
            self._infos.update(found)
        return self._infos

    def _saved(self, run: Run) -> Path | None:
        outputs = self._get(f"/history/{run.prompt}").get(run.prompt, {}).get("outputs", {})
        for shown in outputs.values():
            for file in shown.get("latents", []):
                return self.base / "output" / file["subfolder"] / file["filename"]
        return None

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://{self._address}{path}", timeout=_REPLY_SECONDS) as answer:
            return json.load(answer)

    def _post(self, path: str, content: dict[str, Any]) -> Any:
        data, header = json.dumps(content).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://{self._address}{path}", data, header)
        try:
            with urllib.request.urlopen(request, timeout=_REPLY_SECONDS) as answer:
                return json.loads(answer.read() or "null")
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            raise MeasurementError(f"ComfyUI refused {path}: {text[:600]}") from error


def is_rank(process: psutil.Process) -> bool:
    """Whether it is a rank, and not the supervisor or torchrun, which name the same module."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return "torch.distributed.run" not in words and ("-m", "workers.rank") in itertools.pairwise(words)


def default_python() -> str:
    """The Python that runs this."""
    return sys.executable


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
