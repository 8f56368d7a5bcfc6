"""The HTTP routes of the pack, on ComfyUI's server and under its rules: it refuses the requests of other sites."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import ParallelError

from .actions import ACTIONS
from .diagnostics import read_newest, write_diagnostics
from .live import Live
from .redaction import clean
from .status import read_status

log = logging.getLogger("parallel_dit")
AT_ONCE_SECONDS = 0.3
LARGEST = 128 << 10
"""Bytes of a request that anybody has to send here."""


def add_routes(
    routes: web.RouteTableDef,
    live: Live,
    default_config: Callable[[], ParallelConfig],
    refused_nodes: Mapping[str, str],
) -> None:
    """Add them; see docs/api.md.

    Args:
        live: serves the panels that are open.
        default_config: of loaders without a Parallel Config.
        refused_nodes: types of nodes that the pool cannot carry, each with why.
    """

    @routes.get("/parallel_dit/status")
    async def status(request: web.Request) -> web.Response:
        return web.json_response(await asyncio.to_thread(read_status))

    @routes.get("/parallel_dit/diagnostics")
    async def diagnostics(request: web.Request) -> web.Response:
        return web.json_response({"text": await asyncio.to_thread(write_diagnostics)})

    @routes.get("/parallel_dit/log")
    async def newest_log(request: web.Request) -> web.Response:
        from workers.launch import log_directory

        return web.json_response({"text": clean(await asyncio.to_thread(read_newest, log_directory()))})

    @routes.get("/parallel_dit/refused_nodes")
    async def refused(request: web.Request) -> web.Response:
        return web.json_response(dict(refused_nodes))

    @routes.post("/parallel_dit/watch")
    async def watch(request: web.Request) -> web.Response:
        wishes = await _read(request)
        live.watch(str(wishes.get("client_id", "")), wishes.get("on") is True)
        return web.json_response({"watchers": live.watchers})

    for name in ACTIONS:
        routes.post(f"/parallel_dit/{name}")(_action(name, default_config))


def _action(name: str, default_config: Callable[[], ParallelConfig]) -> Callable[[web.Request], Any]:
    def run(wishes: dict[str, Any]) -> ParallelError | None:
        try:
            ACTIONS[name](wishes, default_config())
        except ParallelError as error:
            log.warning("Parallel DiT: %s: %s", name, error)
            return error
        return None

    async def act(request: web.Request) -> web.Response:
        wishes = await _read(request)
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
    """The JSON object of a request; an empty one where there is none.

    Raises:
        HTTPBadRequest: something else.
        HTTPRequestEntityTooLarge: see `read_json`.
    """
    wishes = await read_json(request)
    if not isinstance(wishes, dict) or not all(isinstance(value, str | bool) for value in wishes.values()):
        raise web.HTTPBadRequest(text="A JSON object of names and texts is expected.")
    return wishes


async def read_json(request: web.Request) -> Any:
    """Its JSON; None where it is none, and an empty object where nothing was sent.

    Raises:
        HTTPRequestEntityTooLarge: it is longer than `LARGEST`; the rest is not read.
    """
    body = b""
    async for piece in request.content.iter_chunked(LARGEST):  # as they come: the first need not be all
        body += piece
        if len(body) > LARGEST:
            raise web.HTTPRequestEntityTooLarge(max_size=LARGEST, actual_size=len(body))
    try:
        return json.loads(body.decode("utf-8", "replace") or "{}")
    except (ValueError, RecursionError):  # the latter for ten thousand open brackets
        return None
