"""What an error of ours was made of, for the canvas, which ComfyUI gives its English text alone."""

from __future__ import annotations

from aiohttp import web
from server import PromptServer

from parallel_runtime.errors import LAST

from .panel.request_body import read_json

PATH = "/parallel_dit/error"


def add_error_route() -> None:
    """Serve it: {"text"} in, the same text as `Said.to_data` out; without values where it is none of ours."""

    @PromptServer.instance.routes.post(PATH)
    async def answer(request: web.Request) -> web.Response:
        wish = await read_json(request)
        text = wish.get("text") if isinstance(wish, dict) else None
        if not isinstance(text, str):
            return web.json_response({"error": "A text is wanted."}, status=400)
        known = {str(said).strip(): said for said in list(LAST)}
        return web.json_response(known[text].to_data() if text in known else [text, text, {}])
