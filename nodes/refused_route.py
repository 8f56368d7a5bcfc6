"""Which types of nodes the pool cannot carry, for the canvas: nodes/model_nodes.py as JSON."""

from __future__ import annotations

from aiohttp import web
from server import PromptServer

from .model_nodes import MODEL_NODES, How

PATH = "/parallel_dit/refused_nodes"


def refused_nodes() -> dict[str, str]:
    """Type of each node that is refused -> why."""
    return {name: node.why for name, node in MODEL_NODES.items() if node.how is How.REFUSED}


def add_refused_route() -> None:
    """Serve it."""

    @PromptServer.instance.routes.get(PATH)
    async def answer(_: web.Request) -> web.Response:
        return web.json_response(refused_nodes())
