"""Text on a node: what the plan is, why a sampler ran per step, what went wrong; and words by which it is found."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
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


def show_text(node_id: str | None, text: str) -> ui.PreviewText:
    """Put `text` on the node now, and return it for the node's output, where it stays with the history."""
    if node_id is not None:
        _put(text, node_id)
    return ui.PreviewText(in_canvas_language(text))


def show_on_running_node(text: str) -> None:
    """Put `text` on the node that calls, be it one of ours or KSampler; nothing where no node is running."""
    if node := running_node()[1]:
        _put(text, node)


def _put(text: str, node_id: str) -> None:
    """Where the canvas shows a text it lets the node grow, so it hears of nodes of ours alone: they have the room. For
    others our own files on the canvas find a place."""
    spoken, server = in_canvas_language(text), PromptServer.instance
    kind = ""
    with contextlib.suppress(NodeNotFoundError):  # of the prompt that runs
        kind = str(get_progress_state().dynprompt.get_node(node_id).get("class_type", ""))
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


def make_schema(**arguments: Any) -> io.Schema:
    """A node of ours, by those arguments that io.Schema has in this ComfyUI; 0.8 has fewer of them."""
    known = inspect.signature(io.Schema).parameters
    return io.Schema(category="parallel", **{name: value for name, value in arguments.items() if name in known})
