"""What the nodes of a prompt showed last, for a page that was loaded since: ComfyUI does not repeat texts on nodes."""

from __future__ import annotations

from typing import Any

from aiohttp import web
from server import PromptServer

from .node_text import SHOWN, in_canvas_language

PATH = "/parallel_dit/texts"


def add_texts_route() -> None:
    """Serve it: a prompt's number in, a text for each of its nodes that showed one."""

    @PromptServer.instance.routes.get(PATH)
    async def answer(request: web.Request) -> web.Response:
        graph = _graph(request.query.get("prompt_id", ""))
        return web.json_response({node: in_canvas_language(text) for node, text in SHOWN.of(graph).items()})


def _graph(prompt_id: str) -> dict[str, Any]:
    """Of a prompt that runs or has run; empty where there is none of that number."""
    queue = PromptServer.instance.prompt_queue
    running, _ = queue.get_current_queue_volatile()
    known = [item for item in running if item[1] == prompt_id]
    known += [entry["prompt"] for entry in queue.get_history(prompt_id=prompt_id).values()]
    return known[0][2] if known else {}
