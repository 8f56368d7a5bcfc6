"""Puts panel and API onto ComfyUI's server."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from server import PromptServer

from parallel_runtime.errors import LAST

from .encoder_places import place_here
from .model_nodes import refused_nodes
from .node_text import SHOWN, in_canvas_language
from .panel.housekeeping import keep_house
from .panel.live import Live
from .panel.routes import add_routes, read_json
from .panel.settings import default_config, read_settings, settings_file
from .panel.status import read_status


def serve_panel() -> None:
    """Add the routes, and do what the settings ask for. Called once, when ComfyUI starts."""
    server = PromptServer.instance
    live = Live(read_status, server.send_sync, lambda client: client in server.sockets)
    add_routes(server.routes, live, lambda: default_config(read_settings(settings_file())), refused_nodes())
    add_error_route()
    add_texts_route()
    add_encoders_route()
    keep_house(lambda: read_settings(settings_file()))


def add_error_route() -> None:
    """Serve it: {"text"} in, the same text as `Said.to_data` out; without values where it is none of ours."""

    @PromptServer.instance.routes.post("/parallel_dit/error")
    async def answer(request: web.Request) -> web.Response:
        wish = await read_json(request)
        text = wish.get("text") if isinstance(wish, dict) else None
        if not isinstance(text, str):
            return web.json_response({"error": "A text is wanted."}, status=400)
        known = {str(said).strip(): said for said in list(LAST)}
        return web.json_response(known[text].to_data() if text in known else [text, text, {}])


def add_texts_route() -> None:
    """Serve it: a prompt's number in, a text for each of its nodes that showed one."""

    @PromptServer.instance.routes.get("/parallel_dit/texts")
    async def answer(request: web.Request) -> web.Response:
        graph = _graph(request.query.get("prompt_id", ""))
        return web.json_response({node: in_canvas_language(text) for node, text in SHOWN.of(graph).items()})


def add_encoders_route() -> None:
    """Serve it: files of text encoders and models in, for each encoder the GPU where it has room, or null."""

    @PromptServer.instance.routes.post("/parallel_dit/encoders")
    async def answer(request: web.Request) -> web.Response:
        wish = await read_json(request)
        if not isinstance(wish, dict):
            return web.json_response({"error": "Encoders and models are wanted."}, status=400)
        return web.json_response({"places": await asyncio.to_thread(place_here, wish)})


def _graph(prompt_id: str) -> dict[str, Any]:
    """Of a prompt that runs or has run; empty where there is none of that number."""
    queue = PromptServer.instance.prompt_queue
    running, _ = queue.get_current_queue_volatile()
    known = [item for item in running if item[1] == prompt_id]
    known += [entry["prompt"] for entry in queue.get_history(prompt_id=prompt_id).values()]
    return known[0][2] if known else {}
