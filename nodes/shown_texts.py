"""What each node showed last, to be shown again where ComfyUI has the node's result cached. No ComfyUI needed."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter

from .prompt_graph import Graph, giver, givers

MOST = 1000
"""Texts; the oldest go first."""


class ShownTexts:
    """Texts by what a node's result follows from, as ComfyUI's cache: numbers and other nodes may change. Nodes write
    and the server reads, from several threads."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._lock = threading.Lock()
        self._graph: Graph | None = None  # of the prompt that runs, whose keys are made once
        self._keys: dict[str, str] = {}

    def note(self, graph: Graph, node: str, text: str) -> None:
        """A node of this prompt shows a text; one that is not in it (made by another while it ran) is left out."""
        with self._lock:
            if graph is not self._graph:
                self._graph, self._keys = graph, keys(graph)
            if (key := self._keys.get(node)) is None:
                return
            self._texts.pop(key, None)
            self._texts[key] = text
            while len(self._texts) > MOST:
                del self._texts[next(iter(self._texts))]

    def of(self, graph: Graph) -> dict[str, str]:
        """Node -> what a node like it, with the same nodes above it, showed last."""
        with self._lock:
            return {node: self._texts[key] for node, key in keys(graph).items() if key in self._texts}


def keys(graph: Graph) -> dict[str, str]:
    """Node -> digest of its type, its values and all nodes above it. A Parallel Config's has the loaders that it is
    linked to besides: what it shows is of their model."""
    links = {name: [each for each in givers(node) if each in graph] for name, node in graph.items()}
    try:
        order = list(TopologicalSorter(links).static_order())
    except CycleError:  # ComfyUI runs none
        order = list(graph)
    found: dict[str, str] = {}
    for name in order:
        found[name] = _digest(graph, name, found)
    for name, node in graph.items():
        if node.get("class_type") == "ParallelConfig":
            found[name] += " " + " ".join(sorted(found[taker] for taker in graph if name in links[taker]))
    return found


def _digest(graph: Graph, name: str, found: Mapping[str, str]) -> str:
    inputs = {
        key: [found.get(start or "", ""), value[1]] if (start := giver(value)) in graph else value
        for key, value in graph[name].get("inputs", {}).items()
    }
    content = json.dumps([graph[name].get("class_type"), inputs], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()
