"""While ComfyUI decodes and saves a picture, ranks begin with the next prompt of its queue, where that differs from the
running one in its seed alone, as those of a batch do. No ComfyUI needed but for its queue."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from parallel_runtime.switches import is_on

from .prompt_graph import Graph

Start = Callable[[], bool]  # has the ranks begin, and returns whether they do


class Prompt(NamedTuple):
    """One in ComfyUI's queue."""

    id: str
    graph: Graph


MOST_MISSED = 2
"""So often the ranks may begin with what a prompt then does not ask for; others of its like will not, either."""
Queue = Callable[[], tuple[Prompt | None, Prompt | None]]  # the running prompt, and the one that comes next


def read_queue() -> tuple[Prompt | None, Prompt | None]:
    """The prompts of ComfyUI's own queue; none where no server runs, or a ComfyUI to come has another."""
    server = getattr(sys.modules.get("server"), "PromptServer", None)
    queue = getattr(getattr(server, "instance", None), "prompt_queue", None)
    read = getattr(queue, "get_current_queue_volatile", lambda: ((), ()))
    running, waiting = ([(item[0], Prompt(str(item[1]), item[2])) for item in items] for items in read())
    coming = min(waiting, key=lambda item: item[0])[1] if waiting else None
    return (running[0][1] if len(running) == 1 else None, coming)


def _kinds(graph: Graph) -> dict[str, Any]:
    return {name: node.get("class_type") for name, node in graph.items()}


def other_seed(one: Graph, other: Graph) -> tuple[int, int] | None:
    """The number that two prompts have in the same places, another in each, where they differ in nothing else."""
    if _kinds(one) != _kinds(other):
        return None
    pairs = set()
    for name, node in one.items():
        mine, its = node.get("inputs", {}), other[name].get("inputs", {})
        if mine.keys() != its.keys():
            return None
        differ = [(value, its[key]) for key, value in mine.items() if value != its[key]]
        if not all(type(value) is int for pair in differ for value in pair):
            return None
        pairs.update(differ)
    return pairs.pop() if len(pairs) == 1 else None


class NextPrompt:
    """Knows what the pools have done for the running prompt. They begin with the next one when they have done as much
    as for the last one, if that had the same nodes: then nothing of the running one waits for them."""

    def __init__(self, queue: Queue = read_queue):
        self._queue = queue
        self._running = Prompt("", {})
        self._uses = self._usual = self._missed = 0
        self._start: tuple[str, Start] | None = None  # of the next prompt, by its id
        self._begun = ""  # the prompt that one was begun for

    def used(self, prepare: Callable[[int, int], Start | None] | None = None, served: bool = False) -> None:
        """A pool has done something for the running prompt, `served` if it had begun before; a loop that is its first
        tells how to `prepare` the same with another seed: given both, what starts it."""
        running, coming = self._queue()
        if running is None or not is_on("ahead"):
            return
        if running.id != self._running.id:
            self._turn_to(running, served)
        self._uses += 1
        if coming is None or not self._usual or self._missed >= MOST_MISSED:
            return
        if self._uses == 1 and prepare is not None and (seeds := other_seed(running.graph, coming.graph)):
            start = prepare(*seeds)
            self._start = None if start is None else (coming.id, start)
        if self._uses == self._usual and self._start is not None and self._start[0] == coming.id and self._start[1]():
            self._begun = coming.id

    def _turn_to(self, running: Prompt, served: bool) -> None:
        alike = _kinds(self._running.graph) == _kinds(running.graph)
        self._usual = self._uses if alike else 0
        if not alike or served:
            self._missed = 0
        elif self._begun == running.id:
            self._missed += 1
        self._running, self._uses, self._start = running, 0, None


NEXT = NextPrompt()
