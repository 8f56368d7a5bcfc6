"""Texts that reach the canvas in English (an error, a plan in the panel) in its language, for those who show them."""

from __future__ import annotations

from aiohttp import web
from server import PromptServer

from .node_text import in_canvas_language
from .panel.request_body import read_json

PATH = "/parallel_dit/sentences"
_LONGEST = 20_000


def add_sentences_route() -> None:
    """Serve it: a list of texts in, a list of texts out."""

    @PromptServer.instance.routes.post(PATH)
    async def answer(request: web.Request) -> web.Response:
        texts = await read_json(request)
        if not isinstance(texts, list) or not all(isinstance(text, str) and len(text) <= _LONGEST for text in texts):
            return web.json_response({"error": "A list of texts is wanted."}, status=400)
        return web.json_response([in_canvas_language(text) for text in texts])
