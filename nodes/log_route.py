"""The end of the newest pool's log, for the canvas: what a button on an error opens."""

from __future__ import annotations

from pathlib import Path

from aiohttp import web
from server import PromptServer

PATH = "/parallel_dit/log"
_BYTES = 32 << 10


def read_tail(folder: Path) -> str:
    """Whole lines from the end of the log that was written last; "" where there is none, or none can be read."""
    try:
        newest = max(folder.glob("*.log"), key=lambda path: path.stat().st_mtime, default=None)
        if newest is None:
            return ""
        with newest.open("rb") as log:
            size = log.seek(0, 2)
            log.seek(max(0, size - _BYTES))
            text = log.read().decode(errors="replace")
    except OSError:
        return ""
    return text if size <= _BYTES else text.partition("\n")[2]


def add_log_route() -> None:
    """Serve it."""

    @PromptServer.instance.routes.get(PATH)
    async def answer(_: web.Request) -> web.Response:
        from workers.launch import log_directory

        return web.json_response({"text": read_tail(log_directory())})
