"""One torchrun of this host: started, heard, and told of when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from parallel_runtime.said import Said, said

from ..launch import PACK_ROOT, PoolSpec, torchrun_command
from ..pool_log import PoolLog
from ..processes import spawn, wait_for_end
from .verdict import Blame


class Torchrun:
    """The parent of ranks; what they write goes to the pool's log."""

    def __init__(self, process: asyncio.subprocess.Process, log: PoolLog):
        self._process = process
        self._log = log

    @classmethod
    async def start(
        cls,
        spec: PoolSpec,
        directory: Path,
        rank_module: str,
        environment: Mapping[str, str],
        log: PoolLog,
        meeting: str = "",
    ) -> Torchrun:
        """Start the ranks of this host; arguments as of `torchrun_command`."""
        command = torchrun_command(spec, directory, rank_module, meeting)
        return cls(await spawn(command, dict(environment), str(PACK_ROOT)), log)

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
        """Wait for its end, and return which sign that is, in words too. Its ranks may hold its output still."""
        code = await wait_for_end(self._process)
        blame = Blame.TORCHRUN_KILLED if code < 0 else Blame.TORCHRUN_ENDED
        return blame, said("torchrun (process {pid}) ended with code {code}", pid=self.pid, code=code)

    async def wait(self) -> None:
        """Wait until it and its output have ended."""
        await self._process.wait()
