"""The HTTP routes of the pack (docs/api.md), under ComfyUI's rules: it refuses the requests of other sites."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from server import PromptServer

from parallel_runtime.errors import LAST, ParallelError
from workers.state_folder import read_newest

from .model_nodes import REFUSED
from .panel.actions import ACTIONS
from .panel.status import clean, read_status, write_diagnostics

log = logging.getLogger("parallel_dit")
AT_ONCE_SECONDS = 0.3
LARGEST = 128 << 10  # bytes of a request that anybody has to send here
_WANTED = "A JSON object of names and texts is expected."


def serve_panel() -> None:
    """Add the routes, and see to it that unused pools end. Called once, when ComfyUI starts."""
    # Not in that thread: ComfyUI's own imports other packs meanwhile.
    from workers.client.pool_registry import end_unused
    from workers.state_folder import log_directory

    routes = PromptServer.instance.routes
    for name, read in {
        "status": read_status,
        "diagnostics": lambda: {"text": write_diagnostics()},
        "log": lambda: {"text": clean(read_newest(log_directory()))},
        "refused_nodes": lambda: dict(REFUSED),
    }.items():
        routes.get(f"/parallel_dit/{name}")(_answer(read))

    @routes.post("/parallel_dit/error")
    async def error(request: web.Request) -> web.Response:
        text = (await _read(request)).get("text")
        if not isinstance(text, str):
            return web.json_response({"error": "A text is wanted."}, status=400)
        known = {str(said).strip(): said for said in list(LAST)}
        return web.json_response(known[text].to_data() if text in known else [text, text, {}])

    for name in ACTIONS:
        routes.post(f"/parallel_dit/{name}")(_action(name))
    threading.Thread(target=end_unused, name="parallel-dit-unused", daemon=True).start()


def _answer(read: Callable[[], dict[str, Any]]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response(await asyncio.to_thread(read))

    return answer


def _action(name: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    def run(wishes: dict[str, Any]) -> ParallelError | None:
        try:
            ACTIONS[name](wishes)
        except ParallelError as error:
            log.warning("Parallel DiT: %s: %s", name, error)
            return error
        return None

    async def act(request: web.Request) -> web.Response:
        wishes = await _read(request)
        if not all(isinstance(value, str | bool) for value in wishes.values()):
            raise web.HTTPBadRequest(text=_WANTED)
        at_once = wishes.pop("at_once", False) is True
        acting = asyncio.ensure_future(asyncio.to_thread(run, wishes))
        # What goes on after that is seen in the status.
        done, _ = await asyncio.wait({acting}, timeout=AT_ONCE_SECONDS if at_once else None)
        error = acting.result() if done else None
        if error is not None:
            return web.json_response({"error": {"cause": clean(error.cause), "fix": clean(error.fix)}}, status=409)
        return web.json_response(await asyncio.to_thread(read_status))

    return act


async def _read(request: web.Request) -> dict[str, Any]:
    """The JSON object of a request, empty where nothing was sent; HTTPBadRequest, HTTPRequestEntityTooLarge."""
    body = b""
    async for piece in request.content.iter_chunked(LARGEST):  # as they come: the first need not be all
        body += piece
        if len(body) > LARGEST:
            raise web.HTTPRequestEntityTooLarge(max_size=LARGEST, actual_size=len(body))
    try:
        wishes = json.loads(body.decode("utf-8", "replace") or "{}")
    except (ValueError, RecursionError):  # the latter for ten thousand open brackets
        wishes = None
    if not isinstance(wishes, dict):
        raise web.HTTPBadRequest(text=_WANTED)
    return wishes
