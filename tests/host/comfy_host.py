"""A real ComfyUI on a base directory of its own, driven through /prompt and its websocket."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import websocket
from safetensors.torch import load_file

from .find_host import PACK_ROOT, Host, find_gguf_pack
from .older_host import skip_as_older
from .workflow import OF_FLUX, Prompt

START_SECONDS = 480
PROMPT_SECONDS = 300
_FOLDERS = ("models/diffusion_models", "custom_nodes", "input", "output", "temp", "user")
_PREVIEW_IMAGE, _TEXT = 1, 3  # types of ComfyUI's binary messages


@dataclass
class Run:
    """What came of one prompt.

    Args:
        outputs: node id -> its UI output.
        error: ComfyUI's `execution_error` message, None if there was none.
        interrupted: it was cancelled.
        progress: (node id, value, maximum) in order.
        previews: JPEG or PNG bytes, in order.
        texts: (node id, text) shown on nodes while it ran.
        executed: nodes that ran; those taken from the cache are not among them.
        times: when each of `executed` and `texts` came, by `time.monotonic`: (node id, text or "", seconds).
    """

    outputs: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    interrupted: bool = False
    progress: list[tuple[str, int, int]] = field(default_factory=list)
    previews: list[bytes] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)
    executed: list[str] = field(default_factory=list)
    times: list[tuple[str, str, float]] = field(default_factory=list)


class PromptRefused(Exception):
    """ComfyUI did not queue the prompt; `answer` is its JSON."""

    def __init__(self, answer: dict[str, Any]):
        super().__init__(json.dumps(answer))
        self.answer = answer


class ComfyHost:
    """One ComfyUI process.

    Args:
        host: which ComfyUI.
        base: empty folder that becomes its base directory.
        options: more of its command line.

    Attributes:
        small_flux: it opens FLUX files that are small; else the models that tests name are SD3's.
    """

    def __init__(self, host: Host, base: Path, options: Sequence[str] = ()):
        self.base = base
        self.host = host
        self.small_flux = True
        for folder in _FOLDERS:
            (base / folder).mkdir(parents=True)
        (base / "custom_nodes" / "parallel-dit").symlink_to(PACK_ROOT)
        (base / "custom_nodes" / "tensor-pack").symlink_to(PACK_ROOT / "tests" / "host" / "tensor_pack")
        if (gguf := find_gguf_pack(host.path)) is not None:
            (base / "custom_nodes" / "ComfyUI-GGUF").symlink_to(gguf)
        self.log = base / "comfyui.log"
        self.address = f"127.0.0.1:{_free_port()}"
        self.client_id = uuid.uuid4().hex
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment |= {
            "PYTHONPATH": host.python_path,
            "OMP_NUM_THREADS": "1",
            "PARALLEL_DIT_LOGS": str(base / "pools"),
            "MALLOC_ARENA_MAX": "2",  # what models of the last test took goes back to the machine
            "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*_command(host, base), "--port", self.address.rpartition(":")[2], *options],
                cwd=host.path,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._wait_until_up()
        # A pool that starts on a busy machine says nothing for a while.
        url = f"ws://{self.address}/ws?clientId={self.client_id}"
        self.socket = websocket.create_connection(url, timeout=PROMPT_SECONDS)

    def run(self, prompt: Prompt, during: Callable[[Run], None] | None = None) -> Run:
        """Queue a prompt and follow it to its end.

        Args:
            during: called after every message, with what came so far.

        Raises:
            PromptRefused: the prompt is not valid.
        """
        if any(
            value in OF_FLUX for node in prompt.values() for value in node["inputs"].values() if isinstance(value, str)
        ):
            self.needs_small_flux()
        try:
            prompt_id = self.post("/prompt", {"prompt": prompt, "client_id": self.client_id})["prompt_id"]
        except PromptRefused as refused:
            there = self.get("/object_info")
            missing = {node["class_type"] for node in prompt.values()} - there.keys()
            if missing and not any(name.startswith(("Parallel", "Test")) for name in missing):
                skip_as_older(self.host.path, f"has no node {', '.join(sorted(missing))}")
            raise refused
        run = Run()
        deadline = time.monotonic() + PROMPT_SECONDS
        while time.monotonic() < deadline:
            message = self.socket.recv()
            finished = _read_binary(run, message) if isinstance(message, bytes) else _read(run, message, prompt_id)
            if during is not None:
                during(run)
            if finished:
                run.outputs = self.get(f"/history/{prompt_id}")[prompt_id]["outputs"]
                return run
        raise TimeoutError(f"the prompt did not end in {PROMPT_SECONDS} s; log:\n{self.log_tail()}")

    def last_run(self) -> dict[str, Any]:
        """What the status says of the sampling run that ended last."""
        return self.get("/parallel_dit/status")["runs"][0]

    def needs_small_flux(self) -> None:
        """Skip a test of FLUX where this ComfyUI opens no small one."""
        if not self.small_flux:
            skip_as_older(self.host.path, "takes the published number of heads for every FLUX: it opens no small one")

    def latent(self, run: Run, node: str) -> torch.Tensor:
        """The tensor that a SaveLatent node wrote."""
        assert run.error is None, run.error
        saved = run.outputs[node]["latents"][0]
        return load_file(self.base / "output" / saved["subfolder"] / saved["filename"])["latent_tensor"]

    def get(self, path: str) -> Any:
        """JSON of a GET request."""
        with urllib.request.urlopen(f"http://{self.address}{path}", timeout=60) as answer:
            return json.load(answer)

    def post(self, path: str, content: dict[str, Any] | None = None, seconds: float = 120) -> Any:
        """JSON of a POST request; None where the answer is empty."""
        data = json.dumps(content or {}).encode()
        request = urllib.request.Request(
            f"http://{self.address}{path}", data=data, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                return json.loads(answer.read() or "null")
        except urllib.error.HTTPError as error:
            if error.code != 400:
                raise
            raise PromptRefused(json.load(error)) from error

    def interrupt(self) -> None:
        """Press cancel."""
        self.post("/interrupt")

    def log_tail(self, lines: int = 60) -> str:
        """End of ComfyUI's console output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        """End ComfyUI."""
        self.socket.close()
        self.process.terminate()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"ComfyUI ended with {self.process.returncode}; log:\n{self.log_tail()}")
            try:
                self.get("/system_stats")
            except OSError:
                time.sleep(0.2)
            else:
                return
        self.process.kill()
        raise AssertionError(f"ComfyUI did not answer within {START_SECONDS} s; log:\n{self.log_tail()}")


def beside(first: ComfyHost, base: Path) -> ComfyHost:
    """A second ComfyUI, with the models of the first; the caller ends it."""
    second = ComfyHost(first.host, base)
    second.small_flux = first.small_flux
    # Links in its own folders: other folders in their place could be of the same age, and ComfyUI would not look.
    for model in (first.base / "models" / "diffusion_models").iterdir():
        (second.base / "models" / "diffusion_models" / model.name).symlink_to(model)
    return second


def _command(host: Host, base: Path) -> list[str]:
    return [
        host.python,
        str(host.path / "main.py"),
        "--cpu",
        "--listen=127.0.0.1",
        "--disable-api-nodes",
        f"--base-directory={base}",
        "--database-url=sqlite:///:memory:",
        "--preview-method=latent2rgb",
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _read_binary(run: Run, message: bytes) -> bool:
    (kind,) = struct.unpack(">I", message[:4])
    if kind == _PREVIEW_IMAGE:
        run.previews.append(message[8:])
    elif kind == _TEXT:
        (length,) = struct.unpack(">I", message[4:8])
        run.texts.append((message[8 : 8 + length].decode(), message[8 + length :].decode()))
        run.times.append((*run.texts[-1], time.monotonic()))
    return False


def _read(run: Run, message: str, prompt_id: str) -> bool:
    """Take in one message; True when the prompt has come to its end (history is complete only then)."""
    kind, data = (content := json.loads(message))["type"], content["data"]
    if kind == "parallel_dit.text":
        run.texts.append((data["node"], data["text"]))
        run.times.append((*run.texts[-1], time.monotonic()))
    if data.get("prompt_id") != prompt_id:
        return False
    if kind == "progress":
        run.progress.append((data["node"], data["value"], data["max"]))
    elif kind == "execution_error":
        run.error = data
    elif kind == "execution_interrupted":
        run.interrupted = True
    elif kind == "executing":
        if data["node"] is None:
            return True
        run.executed.append(data["node"])
        run.times.append((data["node"], "", time.monotonic()))
    return False
