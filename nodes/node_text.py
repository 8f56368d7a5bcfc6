"""Text on a node: what the plan is, why a sampler ran per step."""

from __future__ import annotations

from comfy_api.latest import ui
from server import PromptServer


def show_text(node_id: str | None, text: str) -> ui.PreviewText:
    """Put `text` on the node now, and return it for the node's output, where it stays with the history."""
    if node_id is not None:
        PromptServer.instance.send_progress_text(text, node_id)
    return ui.PreviewText(text)
