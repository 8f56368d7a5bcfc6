"""One torchrun of this host: started, heard, and told of when it ends."""

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


class Torchrun:
    """The parent of ranks; what they write goes to the pool's log."""

    def __init__(self, process: asyncio.subprocess.Process, log: PoolLog):
        self._process = process
        self._log = log

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str], log: PoolLog) -> Torchrun:
        """Start the ranks of this host. It ends with this process, and the ranks with it."""
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
        return cls(process, log)

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    async def hear(self) -> None:
        """Write the log, to the end of what it and its ranks say."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            self._log.write(line.decode(errors="replace").rstrip())

    async def end(self) -> tuple[Blame, Said]:
        """Wait for its end, and return which sign that is, in words too. `wait` returns only when its output has ended
        as well, which children hold that are still there: ranks that have come no further than their imports."""
        while (code := self._process.returncode) is None:
            await asyncio.sleep(POLL_SECONDS)
        blame = Blame.TORCHRUN_KILLED if code < 0 else Blame.TORCHRUN_ENDED
        return blame, said("torchrun (process {pid}) ended with code {code}", pid=self.pid, code=code)

    async def wait(self) -> None:
        """Wait until it and its output have ended."""
        await self._process.wait()
