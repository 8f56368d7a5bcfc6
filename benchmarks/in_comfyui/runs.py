"""One prompt: what came of it and when, out of ComfyUI's messages and the moments of the pack in pack/."""

from __future__ import annotations

import json
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_TEXT = 3  # type of ComfyUI's binary message with a node's text


class MeasurementError(Exception):
    """A measurement that came to nothing; the text says why."""


class TimeLimit(MeasurementError):
    """Its time is over."""


@dataclass
class Run:
    """One prompt, in moments of `time.monotonic()`.

    Args:
        prompt: its id.
        posted: when it was queued.
        ended: when ComfyUI said that it has ended.
        error: text of the node that failed.
        interrupted: it was cancelled.
        texts: what nodes showed.
        events: moments of the pack in pack/, each with kind, time and node.
        saved: the latent's file.
        nodes: what ran, in order: its name in the graph, and when ComfyUI said that it began.
    """

    prompt: str
    posted: float
    ended: float = 0.0
    error: str = ""
    interrupted: bool = False
    texts: list[str] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    saved: Path | None = None
    nodes: list[tuple[str, float]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """From the queue to the end."""
        return self.ended - self.posted

    def steps(self, node: str | None = None) -> list[float]:
        """Moments at which steps were done, of one node or of all."""
        return [
            event["time"]
            for event in self.events
            if event["kind"] == "step" and (node is None or event["node"] == node)
        ]

    def spans(self) -> list[tuple[str, float, float]]:
        """Nodes that ran, each with the moments of its begin and its end."""
        ends = [began for _, began in self.nodes[1:]] + [self.ended]
        return [(name, began, end) for (name, began), end in zip(self.nodes, ends, strict=True)]

    @property
    def first_step(self) -> float:
        """Seconds from the queue to the end of the first step.

        Raises:
            MeasurementError: there was none.
        """
        if not (steps := self.steps()):
            raise MeasurementError("no step was reported")
        return steps[0] - self.posted

    @property
    def sampled(self) -> float:
        """Moment at which the last latent was there."""
        return max(event["time"] for event in self.events if event["kind"] == "mark")


def take_in(run: Run, message: str | bytes) -> str:
    """Take in one message of the websocket.

    Returns:
        Its type where it is about this prompt, "" where it is not, "end" where the prompt has come to its end.
    """
    if isinstance(message, bytes):
        _read_binary(run, message)
        return ""
    kind, data = (content := json.loads(message))["type"], content["data"]
    if kind == "parallel_dit.text":  # on a node that is not of ours, such as KSampler
        run.texts.append(data["text"])
    if data.get("prompt_id") != run.prompt:
        return ""
    return "end" if _read(run, kind, data) else kind


def _read_binary(run: Run, message: bytes) -> None:
    (kind,) = struct.unpack(">I", message[:4])
    if kind == _TEXT:
        (length,) = struct.unpack(">I", message[4:8])
        run.texts.append(message[8 + length :].decode(errors="replace"))


def _read(run: Run, kind: str, data: dict[str, Any]) -> bool:
    """Take in one message; True when the prompt has come to its end."""
    if kind == "execution_error":
        run.error = f"{data.get('node_type')}: {data.get('exception_message', '').strip()}"
    elif kind == "execution_interrupted":
        run.interrupted = True
    elif kind == "executing" and data["node"] is not None:
        run.nodes.append((data["node"], time.monotonic()))
    return kind == "executing" and data["node"] is None
