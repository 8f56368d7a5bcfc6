"""The status over ComfyUI's websocket, to those whose panel is open, when something has changed."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

EVENT = "parallel_dit.status"
SECONDS = 1.0

log = logging.getLogger("parallel_dit")


class Live:
    """Works while somebody watches, and on the server's loop alone.

    Args:
        read: the status; takes a moment, so it runs in a thread.
        send: (event, data, client) over the websocket.
        connected: whether a client still is.
    """

    def __init__(
        self,
        read: Callable[[], dict[str, Any]],
        send: Callable[[str, dict[str, Any], str], None],
        connected: Callable[[str], bool],
        seconds: float = SECONDS,
    ):
        self._read = read
        self._send = send
        self._connected = connected
        self._seconds = seconds
        self._told: dict[str, str] = {}  # client -> what it was told last
        self._task: asyncio.Task[None] | None = None

    @property
    def watchers(self) -> int:
        """Clients whose panel is open."""
        return len(self._told)

    def watch(self, client: str, on: bool) -> None:
        """A client's panel opens, or closes."""
        if not on:
            self._told.pop(client, None)
        elif self._connected(client):
            self._told[client] = ""
            if self._task is None or self._task.done():
                self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while self._told:
            status = await asyncio.to_thread(self._read)
            now = coarse(status)
            for client, told in list(self._told.items()):
                if not self._connected(client):
                    self._told.pop(client, None)
                elif now != told:
                    self._send(EVENT, status, client)
                    self._told[client] = now
            await asyncio.sleep(self._seconds)


def coarse(status: dict[str, Any]) -> str:
    """Equal for two statuses between which nothing happened: bytes count in steps of 16 MiB, and clocks not at all."""

    def rounded(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: rounded(each) for name, each in value.items() if name not in ("idle_seconds", "available")}
        if isinstance(value, list):
            return [rounded(each) for each in value]
        return value >> 24 if isinstance(value, int) and value > 1 << 24 else value

    return json.dumps(rounded(status))
