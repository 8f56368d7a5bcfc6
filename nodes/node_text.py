"""Text on a node: what the plan is, why a sampler ran per step, what went wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from comfy_api.latest import ui
from comfy_execution.utils import get_executing_context
from server import PromptServer

from parallel_runtime.errors import ParallelError


def show_text(node_id: str | None, text: str) -> ui.PreviewText:
    """Put `text` on the node now, and return it for the node's output, where it stays with the history."""
    if node_id is not None:
        PromptServer.instance.send_progress_text(text, node_id)
    return ui.PreviewText(text)


def show_on_running_node(text: str) -> None:
    """Put `text` on the node that calls, be it one of ours or KSampler; nothing where no node is running."""
    running = get_executing_context()
    if running is not None:
        PromptServer.instance.send_progress_text(text, running.node_id)


@contextlib.contextmanager
def errors_shown() -> Iterator[None]:
    """Put an error of ours on the running node too, where the text of its last run would go on standing."""
    try:
        yield
    except ParallelError as error:
        show_on_running_node(str(error))
        raise
