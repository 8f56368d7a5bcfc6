"""Text on a node: what it is, what the plan is, why a sampler ran per step, what went wrong."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from comfy_api.latest import io, ui
from comfy_execution.graph import NodeNotFoundError
from comfy_execution.progress import get_progress_state
from comfy_execution.utils import get_executing_context
from server import PromptServer

from parallel_runtime.errors import ParallelError

from .panel.settings import language_of, read_settings
from .run_notices import STOPPED, RunNotices
from .spoken import in_language

EVENT = "parallel_dit.text"
_TEXTS = Path(__file__).parent.parent / "locales" / "en" / "nodeDefs.json"


def show_text(text: str) -> ui.PreviewText:
    """Put `text` on the node that runs now, and return it for its output, where it stays with the history."""
    show_on_running_node(text)
    return ui.PreviewText(in_canvas_language(text))


def show_on_running_node(text: str) -> None:
    """Put `text` on the node that calls, be it one of ours or KSampler; nothing where no node is running."""
    node_id = running_node()[1]
    if not node_id:
        return
    spoken, server, kind = in_canvas_language(text), PromptServer.instance, ""
    with contextlib.suppress(NodeNotFoundError):  # of the prompt that runs
        kind = str(get_progress_state().dynprompt.get_node(node_id).get("class_type", ""))
    # A node grows by a text of the canvas, for which ours have the room; for others our files find a place.
    if kind.startswith("Parallel"):
        server.send_progress_text(spoken, node_id)
    else:
        server.send_sync(EVENT, {"node": node_id, "text": spoken})


def running_node() -> tuple[str, str]:
    """Prompt and node that are running; "" where none is."""
    running = get_executing_context()
    return (running.prompt_id, running.node_id) if running is not None else ("", "")


def notices_on_running_node(model: str) -> RunNotices:
    """Of a model's runs, on the node that calls; `model` is its file's name."""
    return RunNotices(show_on_running_node, model=model, where=running_node, move_bar=_move_bar)


def _move_bar(done: int, total: int) -> None:
    if node := running_node()[1]:
        get_progress_state().update_progress(node, done, total, None)


def in_canvas_language(text: str) -> str:
    """The text in the language that the artist chose in ComfyUI, as far as there are sentences for it."""
    return in_language(text, language_of(read_settings()))


@contextlib.contextmanager
def failing_shown() -> Iterator[None]:
    """Take the text of the last run from the running node where it fails: the canvas has the error itself there."""
    try:
        yield
    except ParallelError:
        show_on_running_node(STOPPED)
        raise


def make_schema(node_id: str, *, inputs: list[io.Input], outputs: list[io.Output], **others: Any) -> io.Schema:
    """A node of ours with its English texts; ComfyUI 0.8 has not all of the arguments."""
    texts = json.loads(_TEXTS.read_text(encoding="utf-8"))[node_id]
    for given in inputs:
        given.tooltip = texts["inputs"][given.id].get("tooltip")
    for number, output in enumerate(outputs):
        told = texts["outputs"][str(number)]
        output.display_name, output.tooltip = told.get("name"), told["tooltip"]
    known = inspect.signature(io.Schema).parameters
    others = {name: value for name, value in others.items() if name in known}
    names = {"display_name": texts["display_name"], "description": texts["description"], "category": "parallel"}
    return io.Schema(node_id, inputs=inputs, outputs=outputs, **names, **others)
