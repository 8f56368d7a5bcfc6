"""A process that the supervisor has started: a rank, or torchrun where several machines meet."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence

from parallel_runtime.said import Said, said

from ..launch import PACK_ROOT
from ..pool_log import PoolLog
from ..processes import die_with_parent
from .verdict import Blame

POLL_SECONDS = 0.1


class Started:
    """What it and those that it starts write goes to the pool's log."""

    def __init__(self, process: asyncio.subprocess.Process, rank: str | None, log: PoolLog):
        self._process = process
        self._rank = rank
        self._log = log

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str], log: PoolLog) -> Started:
        """Start one. It ends with this process, and the ranks with it."""
        parent = os.getpid()
        process = await asyncio.create_subprocess_exec(
            *command,
            env=dict(environment),
            cwd=PACK_ROOT,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(parent),
            limit=1 << 20,
        )
        return cls(process, environment.get("RANK"), log)

    async def hear(self) -> None:
        """Write the log, to the end of what it and its ranks say."""
        assert self._process.stdout is not None
        prefix = "" if self._rank is None else f"[rank {self._rank}] "
        while line := await self._process.stdout.readline():
            self._log.write(prefix + line.decode(errors="replace").rstrip())

    async def end(self) -> tuple[Blame, Said]:
        """Wait for its end, and return which sign that is, in words too. `wait` returns only when its output has ended
        as well, which children hold that are still there: ranks that have come no further than their imports."""
        while (code := self._process.returncode) is None:
            await asyncio.sleep(POLL_SECONDS)
        if self._rank is not None:
            await asyncio.sleep(POLL_SECONDS)  # its connection's end, where it had one, is seen first
            what = said(
                "Worker {rank} (process {pid}) ended with code {code}",
                rank=self._rank,
                pid=self._process.pid,
                code=code,
            )
            return Blame.PROCESS_ENDED, what
        blame = Blame.TORCHRUN_KILLED if code < 0 else Blame.PROCESS_ENDED
        return blame, said("torchrun (process {pid}) ended with code {code}", pid=self._process.pid, code=code)

    async def wait(self) -> None:
        """Wait until it and its output have ended."""
        await self._process.wait()
