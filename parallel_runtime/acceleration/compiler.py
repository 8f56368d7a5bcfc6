"""PyTorch's compiler: what it is told when it compiles the repeated blocks of a network, one graph for all of a kind,
and what a rank hears of it.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    known: dict[str, Setting] = {"a limit of graphs": _graph_limits, "open sizes": _unequal_sizes}
    known["passes"] = partial(_inductor_options, dict(options))
    if numbers:
        known["open numbers"] = partial(_open_numbers, tuple(numbers))
    return _usable(known)


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


def _usable(settings: Mapping[str, Setting]) -> list[Setting]:
    """Those that this torch knows, by trying each."""
    usable = []
    for name, setting in settings.items():
        try:
            with setting():
                usable.append(setting)
        except (ImportError, AttributeError) as error:
            log.warning("Blocks are compiled without %s: %s: %s", name, type(error).__name__, error)
    return usable


def _graph_limits() -> contextlib.AbstractContextManager[Any]:
    import torch._dynamo

    dynamo = torch._dynamo.config
    limit = "recompile_limit" if hasattr(dynamo, "recompile_limit") else "cache_size_limit"  # torch 2.6
    return dynamo.patch({limit: LIMIT, "automatic_dynamic_shapes": False})


def _unequal_sizes() -> contextlib.AbstractContextManager[Any]:
    """Sizes that happen to be equal stay two."""
    import torch.fx.experimental._config as symbolic_shapes

    return symbolic_shapes.patch(use_duck_shape=False)  # type: ignore[attr-defined]


def _open_numbers(names: Sequence[str]) -> contextlib.AbstractContextManager[Any]:
    """Token indices are any numbers: what is one, or the first two items of the tuples in a list."""
    import torch.compiler.config

    found = (rf"L\[.*\]\{name}" if name.startswith(".") else rf"L\['{name}'\]" for name in names)
    sources = ",".join(rf"{each}(\[\d+\]\[[01]\])?$" for each in found)
    return torch.compiler.config.patch(dynamic_sources=sources)  # type: ignore[attr-defined]


def _inductor_options(options: dict[str, Any]) -> contextlib.AbstractContextManager[Any]:
    import torch._inductor.config

    return torch._inductor.config.patch(options)


def imports() -> list[Callable[[], object]]:
    """What compiling imports and reads before it begins, part by part; seconds in all."""
    return [*(partial(importlib.import_module, name) for name in _MODULES), _read_sources]


def _read_sources() -> None:
    """The key of every graph on disk has a digest of PyTorch's sources, which is made once a process."""
    from torch._inductor.codecache import torch_key

    torch_key()


def watch(begin: Callable[[], None], end: Callable[[], None]) -> None:
    """Have `begin` called before each graph that this process compiles, and `end` after it.

    Meanwhile no cycles are looked for: tracing makes objects by the million, all of them alive, and each search among
    them takes a good part of a second.
    """
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
