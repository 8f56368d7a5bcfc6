"""What PyTorch's compiler is told of a network's repeated blocks, one graph for all of a kind, and what it tells.

A graph must not depend on what was compiled before it, or by coincidence on sizes that are equal: the next process
finds it on disk only if it asks for the same. So the numbers of rows and tokens are left open from the start, and
PyTorch is kept from finding open sizes by itself. PyTorch keeps graphs by code object, which all models of a class
share, and gives up when one has too many: so each model compiles functions of its own.

Private parts of torch are imported where blocks are compiled, and nowhere else; one that this torch lacks costs what
it is for, and a line in the log.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import FunctionType
from typing import Any

from ..switches import is_on

log = logging.getLogger(__name__)

LIMIT = 64
"""Graphs of one function: batches, plans and uneven shares each may need one. PyTorch's 8 is soon used up."""
_OF_A_CALL = 8
"""As many as one request may need, at most: its branches, one row or more, its uneven shares."""
_MODULES = ("sympy", "torch._dynamo", "torch._functorch.aot_autograd", "torch._inductor.compile_fx")
"""In the order in which they import each other, so that each is a part of the whole."""

_EARLIER = {"recompile_limit": "cache_size_limit"}
"""Names of torch 2.6."""


def with_own_code(function: Any) -> Any:
    """A function that does the same, with a code object of its own."""
    code, names = function.__code__.replace(), function.__globals__
    copied = FunctionType(code, names, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__qualname__, copied.__module__ = function.__qualname__, function.__module__
    return copied


def room(functions: Iterable[Callable[..., Any]]) -> int:
    """How many graphs each of these may still get, the least of all; 0 where that is too few for a call."""
    try:
        from torch._dynamo.eval_frame import _debug_get_cache_entry_list as graphs_of
    except ImportError:  # another torch: it says so itself at the limit
        return LIMIT
    most = max((len(graphs_of(function.__code__)) for function in functions), default=0)
    return max(0, LIMIT - _OF_A_CALL - most)


Setting = Callable[[], contextlib.AbstractContextManager[Any]]


def settings(options: Mapping[str, Any], numbers: Iterable[str] = ()) -> list[Setting]:
    """What torch.compile is told around whatever may compile, as far as this torch knows it: options of its backend, as
    those of a block come too late for a pass as early as ours in torch 2.6; and `numbers`, arguments that hold token
    indices, and behind a dot attributes of objects that do: graphs leave them open, as they leave sizes."""
    known: dict[str, tuple[str, dict[str, Any]]] = {
        "a limit of graphs": ("torch._dynamo.config", {"recompile_limit": LIMIT, "automatic_dynamic_shapes": False}),
        "open sizes": ("torch.fx.experimental._config", {"use_duck_shape": False}),  # those that are equal stay two
        "passes": ("torch._inductor.config", dict(options)),
    }
    if numbers:
        known["open numbers"] = ("torch.compiler.config", {"dynamic_sources": _sources(numbers)})
    usable: list[Setting] = []
    for name, (module, changes) in known.items():
        try:
            config: Any = importlib.import_module(module)
            here = {key if hasattr(config, key) else _EARLIER.get(key, key): value for key, value in changes.items()}
            with config.patch(here):
                usable.append(partial(config.patch, here))
        except (ImportError, AttributeError) as error:
            log.warning("Blocks are compiled without %s: %s: %s", name, type(error).__name__, error)
    return usable


def _sources(names: Iterable[str]) -> str:
    """Token indices are any numbers: what is one, or the first two items of the tuples in a list."""
    found = (rf"L\[.*\]\{name}" if name.startswith(".") else rf"L\['{name}'\]" for name in names)
    return ",".join(rf"{each}(\[\d+\]\[[01]\])?$" for each in found)


def our_passes() -> dict[str, Any]:
    """Options by which torch.compile applies our passes, none where they are switched off, or this torch has no place
    for them."""
    if not is_on("passes"):
        return {}
    try:
        from .passes import Passes
    except (ImportError, AttributeError) as error:
        log.warning("Blocks are compiled without our passes: %s: %s", type(error).__name__, error)
        return {}
    return {"pre_grad_custom_pass": Passes()}


def imports() -> list[Callable[[], object]]:
    """What compiling imports and reads before it begins, part by part; seconds in all. The last is a digest of
    PyTorch's sources, part of the key of every graph on disk, which is made once a process."""
    parts = [partial(importlib.import_module, name) for name in _MODULES]
    return [*parts, lambda: importlib.import_module("torch._inductor.codecache").torch_key()]


def watch(begin: Callable[[], None], end: Callable[[], None]) -> None:
    """Have `begin` called before each graph that this process compiles, and `end` after it. Meanwhile no cycles are
    looked for: each search among the million objects of tracing, all alive, takes a good part of a second."""
    since, collects = 0.0, False

    def begins(*_: object) -> None:
        nonlocal since, collects
        since, collects = time.perf_counter(), gc.isenabled()
        gc.disable()
        begin()

    def ends(*_: object) -> None:
        end()
        if collects:
            gc.enable()
        log.info("Compiled a graph, or took it from disk, in %.1f s.", time.perf_counter() - since)

    try:
        import torch._dynamo.callback

        handler = torch._dynamo.callback.callback_handler
        handler.register_start_callback(begins)
        handler.register_end_callback(ends)
    except (ImportError, AttributeError) as error:
        what = "A graph that compiles for over a minute looks like a stall, as this torch does not tell: %s"
        log.warning(what, error)
