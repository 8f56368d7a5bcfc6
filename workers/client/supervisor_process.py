"""The supervisor as the process that starts it holds it: its folder, its log, its end. One may begin before ComfyUI has
imported torch, of which it needs nothing."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys

import msgspec

from parallel_runtime.errors import PoolError
from parallel_runtime.requests.comfyui_code import ComfyuiCode
from parallel_runtime.said import Said, said

from ..launch import EXPECTED_COMFYUI, OWN_SESSION, PoolSpec
from ..leftovers import end_tree, make_folder
from ..state_folder import begin_log, last_line, log_directory, tell_of_fresh_pool
from ..wire.connection import Connection

LAST_WORD_SECONDS = 1.0
KILL_SECONDS = 2.0
RANKS = "workers.rank"


class SupervisorProcess:
    """Started by its constructor."""

    def __init__(self, spec: PoolSpec, rank_module: str):
        logs = log_directory()  # may raise, before there is a folder
        self._folder = make_folder()
        self.directory = self._folder.path
        self.log = logs / f"pool-{self.directory.name.rpartition('-')[2]}.log"
        try:
            self._process, self.connection = self._start(spec, rank_module)
        except OSError as error:
            self._folder.close()
            what = "The workers' supervisor could not be started: {strerror}."
            fix = "Close other programs, or raise the limit that this names, and queue the prompt again."
            raise PoolError(what, fix, strerror=error.strerror or error) from error
        self.pid = self._process.pid
        self._folder.let_go()  # the supervisor holds it now

    def _start(self, spec: PoolSpec, rank_module: str) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "workers.supervisor", str(theirs.fileno()), str(os.getpid())]
        command += [str(self.directory), str(self.log), str(spec), rank_module]
        log = begin_log(self.log)
        with theirs, log or contextlib.nullcontext():
            try:
                # The log has what it says where it cannot start, which no message of its own can tell.
                inherited = [theirs.fileno(), self._folder.descriptor]
                process = subprocess.Popen(command, pass_fds=inherited, stdout=log, stderr=log, **OWN_SESSION)
            except OSError:
                ours.close()
                raise
        return process, Connection(ours)

    def error(self, what: Said) -> PoolError:
        """It, and with it the pool, is gone: what happened, and where to read on."""
        text = "The workers' supervisor (process {pid}) {what}."
        return PoolError(text, tell_of_fresh_pool(self.log), pid=self.pid, what=what)

    def last_words(self) -> PoolError:
        """How it ended, where it could not say so itself."""
        self.wait(LAST_WORD_SECONDS)  # its connection closes a moment before it has ended
        if (code := self._process.returncode) is None:
            return self.error(said("closed its connection"))
        if code > 0 and (last := last_line(self.log)):  # whom a signal ends says nothing
            return self.error(said("ended with code {code} and said: {last}", code=code, last=last))
        return self.error(said("ended with code {code}", code=code))

    def wait(self, seconds: float) -> None:
        """Wait for its end, for at most so long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def end_by_force(self) -> None:
        """End it, stopped or not, and with it by the kernel's hand every process of the pool."""
        if self._process.poll() is None:
            end_tree(self._process.pid, kill_seconds=KILL_SECONDS)
        self.connection.close()
        self.wait(KILL_SECONDS)  # longer is one inside of a driver, or of a file system that hangs
        self._folder.close()


_early: dict[PoolSpec, SupervisorProcess] = {}


def start_early(spec: PoolSpec, comfyui: ComfyuiCode) -> None:
    """Start a pool's processes, for the pool that starts first; they end with this process. Its ranks, and those of
    later pools, import what they will want of ComfyUI's code."""
    os.environ[EXPECTED_COMFYUI] = msgspec.json.encode(comfyui).decode()
    _early[spec] = SupervisorProcess(spec, RANKS)


def take_early(spec: PoolSpec | None) -> SupervisorProcess | None:
    """Those of a pool that starts now, if it is that one. Others end: whoever started them was mistaken."""
    found = None if spec is None else _early.pop(spec, None)
    while _early:
        _early.popitem()[1].end_by_force()
    return found
