"""The first forward of blocks that were compiled ahead, and what is found on disk for it."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)

_COMPILING = ("torch", "triton", "sympy")
"""Packages of which nothing is imported before something is compiled, by the thousand modules."""
_SWITCH_SECONDS = 0.0005
"""How long imports may keep the thread that launches kernels from going on."""


@dataclass(frozen=True)
class Graphs:
    """Graphs of this process, by where torch.compile got them from.

    Args:
        found: on disk, by the key of what was traced.
        lowered: traced on to the operators of the compiler, and found on disk by the key of these.
        made: compiled here.
    """

    found: int
    lowered: int
    made: int

    @classmethod
    def so_far(cls) -> Graphs:
        """As torch counts them since the process began."""
        from torch._dynamo.utils import counters

        found = counters["aot_autograd"]["autograd_cache_hit"]
        at_all = counters["inductor"]["fxgraph_cache_hit"]  # those found by the first key among them
        made = sum(counters["inductor"][f"fxgraph_cache_{outcome}"] for outcome in ("miss", "bypass"))
        return cls(found, at_all - found, made)

    def __sub__(self, earlier: Graphs) -> Graphs:
        return Graphs(self.found - earlier.found, self.lowered - earlier.lowered, self.made - earlier.made)


def swap(call: Callable[[bool], Any]) -> Any:
    """Return call(compiled), the first of its kind, and tell the log how long it took and why."""
    before, started = Graphs.so_far(), time.perf_counter()
    with _no_collection():
        output = call(True)
    graphs = Graphs.so_far() - before
    log.info(
        "Blocks run compiled from this step on: %d graphs were on disk, %d after lowering, %d had to be made, %.1f s.",
        graphs.found,
        graphs.lowered,
        graphs.made,
        time.perf_counter() - started,
    )
    return output


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Inside, no cycles are looked for: tracing makes objects by the million, all of them alive, and each search among
    them takes a good part of a second."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def imported_modules() -> tuple[str, ...]:
    """What this process has imported of the packages that compile, in this order."""
    return tuple(
        name
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in _COMPILING
        and not name.startswith("torch.testing")
        and getattr(module, "__spec__", None) is not None
    )


def import_ahead(modules: Iterable[str]) -> None:
    """Import these beside the steps, so that the swap does not: it would take seconds, and more with a cold disk."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        for name in modules:
            if name not in sys.modules:
                with contextlib.suppress(ImportError):  # kernels look like modules, and are none
                    importlib.import_module(name)
        from torch._inductor.codecache import torch_key

        torch_key()  # reads all of torch's sources, once
    finally:
        sys.setswitchinterval(before)
