"""Puts panel and API onto ComfyUI's server."""

from __future__ import annotations

from server import PromptServer

from .error_route import add_error_route
from .model_nodes import refused_nodes
from .panel.housekeeping import keep_house
from .panel.live import Live
from .panel.routes import add_routes
from .panel.settings import default_config, read_settings, settings_file
from .panel.status import read_status
from .texts_route import add_texts_route


def serve_panel() -> None:
    """Add the routes, and do what the settings ask for. Called once, when ComfyUI starts."""
    server = PromptServer.instance
    live = Live(read_status, server.send_sync, lambda client: client in server.sockets)
    add_routes(server.routes, live, lambda: default_config(read_settings(settings_file())), refused_nodes())
    add_error_route()
    add_texts_route()
    keep_house(lambda: read_settings(settings_file()))
