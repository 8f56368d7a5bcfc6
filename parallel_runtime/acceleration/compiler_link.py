"""A rank's side of its compiler process: started when there is something to compile, gone when all is made."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ..mesh.mesh import Mesh
from .compile_ahead import Progress
from .compiler_messages import Call, HostToCompile, Outcome, ToCompile, describe, describe_mesh
from .swap import import_ahead

log = logging.getLogger(__name__)

_ROOT = Path(__file__).resolve().parent.parent.parent
_CONTEXT_BYTES = 1 << 30
"""What a process takes of a GPU before it computes anything, and memory for kernels."""
_MOST_THREADS = 8


class ProcessCompiler:
    """Compiles in a process of its own, on the rank's device, at low priority. See `compiler_process`.

    A process and not a thread: it shares no lock of Python's with the steps, and what it does wrong, it does to itself.

    Args:
        module: what the process runs, engine/compiler_process.py.
        describe_model: what the process builds, in the world of the moment.
        weight_bytes: of what it holds, one block of each kind.
        peer_bytes: of the memory that the ranks shared in the call that just ran, None where there was none.
    """

    def __init__(
        self,
        module: str,
        describe_model: Callable[[], ToCompile | HostToCompile],
        weight_bytes: int,
        peer_bytes: Callable[[], int | None],
    ):
        self._module = module
        self._describe_model = describe_model
        self._weight_bytes = weight_bytes
        self._peer_bytes = peer_bytes
        self._progress: dict[int, Progress] = {}
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def watch(self) -> None:
        """See Compiler."""

    def submit(self, number: int, mesh: Mesh, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """See Compiler. Where the GPU has no memory for one more process, the rank itself is to compile."""
        try:
            self.tell(number, mesh, describe([list(args), dict(kwargs)]))
        except TypeError as error:
            log.info("Not compiled: %s", error)
            self._progress[number] = Progress.FAILED

    def leave_to_rank(self, number: int, why: str) -> None:
        """Have the rank compile."""
        log.info("%s: the next step compiles, and waits for it.", why)
        self._progress[number] = Progress.DONE

    def tell(self, number: int, mesh: Mesh, arguments: Any) -> None:
        """Begin with a call that is described already.

        Raises:
            TypeError: it is no plain data.
        """
        if not self._has_memory():
            self.leave_to_rank(number, "No memory beside the model for a compiler")
            return
        call = Call(number, describe_mesh(mesh, dist.get_process_group_ranks), arguments, self._peer_bytes())
        message = msgspec.json.encode(call) + b"\n"
        with self._lock:
            self._progress[number] = Progress.WORKING
            try:
                self._connected().sendall(message)
            except (OSError, TypeError) as error:  # it died just now, or a configuration that is no plain data
                log.info("The compiler cannot be told: %s", error)
                self._progress[number] = Progress.FAILED

    def progress(self, number: int) -> Progress:
        """See Compiler."""
        return self._progress.get(number, Progress.FAILED)

    def close(self) -> None:
        """See Compiler. The process ends as its socket does."""
        with self._lock:
            self._drop()

    def _connected(self) -> socket.socket:
        if self._socket is None:
            model = self._describe_model()
            own, other = socket.socketpair()
            threads = max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // max(1, model.world_size)))
            environment = {
                **os.environ,
                "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
                # Part of the key of graphs that read anything on the CPU; a rank's is another once its pool has grown.
                "OMP_NUM_THREADS": str(torch.get_num_threads()),
            }
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module, str(other.fileno())],
                cwd=_ROOT,
                env=environment,
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
            )
            other.close()
            self._socket = own
            own.sendall(msgspec.json.encode(model) + b"\n")
            threading.Thread(target=self._read, args=(own, self._process), name="compiler", daemon=True).start()
        return self._socket

    def _read(self, connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
        with connection.makefile("rb") as stream:
            try:
                for line in stream:
                    outcome = msgspec.json.decode(line, type=Outcome)
                    threading.Thread(target=self._note, args=(outcome,), name="swap", daemon=True).start()
            except OSError:
                pass  # closed by us
        process.wait()
        with self._lock:
            if self._process is process:  # not closed by us: what it had not made, it never will
                log.warning("The compiler beside this rank ended with code %d.", process.returncode)
                self._drop()

    def _note(self, outcome: Outcome) -> None:
        try:
            if outcome.failure:
                log.warning("A graph could not be made ahead: %s", outcome.failure)
            else:
                import_ahead(outcome.modules)
        finally:
            self._settle(outcome)

    def _settle(self, outcome: Outcome) -> None:
        with self._lock:
            self._progress[outcome.number] = Progress.FAILED if outcome.failure else Progress.DONE
            if Progress.WORKING not in self._progress.values():
                self._drop()  # its memory is worth more than the seconds of the next start

    def _drop(self) -> None:
        for number, progress in self._progress.items():
            if progress is Progress.WORKING:
                self._progress[number] = Progress.FAILED
        if self._socket is not None:
            self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
        self._socket = self._process = None

    def _has_memory(self) -> bool:
        device = torch.device(self._describe_model().device)
        if device.type != "cuda":
            return True
        free, _ = torch.cuda.mem_get_info(device)
        # What a forward needs beside the weights: the most that was allocated, while the model was there.
        needed = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
        return free > self._weight_bytes + needed + _CONTEXT_BYTES
