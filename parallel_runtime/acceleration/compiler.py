"""What a rank tells PyTorch's compiler beside its blocks, and hears from it. Imports the compiler when it is called."""

from __future__ import annotations

import gc
import importlib
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial

log = logging.getLogger(__name__)

_MODULES = ("sympy", "torch._dynamo", "torch._functorch.aot_autograd", "torch._inductor.compile_fx")
"""In the order in which they import each other, so that each is a part of the whole."""


def imports() -> list[Callable[[], object]]:
    """What compiling imports and reads before it begins, part by part; seconds in all."""
    return [*(partial(importlib.import_module, name) for name in _MODULES), _read_sources]


def _read_sources() -> None:
    """The key of every graph on disk has a digest of PyTorch's sources, which is made once a process."""
    from torch._inductor.codecache import torch_key

    torch_key()


def watch(begin: Callable[[], None], end: Callable[[], None]) -> None:
    """Have `begin` called before each graph that this process compiles, and `end` after it."""
    try:
        import torch._dynamo.callback

        graph = _Graph(begin, end)
        handler = torch._dynamo.callback.callback_handler
        handler.register_start_callback(graph.begins)
        handler.register_end_callback(graph.ends)
    except (ImportError, AttributeError) as error:
        log.warning(
            "A graph that compiles for over a minute looks like a stall, as this torch does not tell: %s", error
        )


class _Graph:
    """The graph that is being compiled. Meanwhile no cycles are looked for: tracing makes objects by the million, all
    of them alive, and each search among them takes a good part of a second."""

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]):
        self._begin, self._end = begin, end
        self._collects = False
        self._since = 0.0

    def begins(self, *_: object) -> None:
        """Before a graph."""
        self._since = time.perf_counter()
        self._collects = gc.isenabled()
        gc.disable()
        self._begin()

    def ends(self, *_: object) -> None:
        """After it."""
        self._end()
        if self._collects:
            gc.enable()
        log.info("Compiled a graph, or took it from disk, in %.1f s.", time.perf_counter() - self._since)


def allow_in_graph(kinds: Iterable[type]) -> None:
    """Have these classes called in a graph as they are, and not traced."""
    import torch._dynamo

    for kind in kinds:
        torch._dynamo.allow_in_graph(kind)
