"""What torch.compile is told when it compiles the repeated blocks of a network, one graph for all of a kind.

A graph must not depend on what was compiled before it, or by coincidence on sizes that are equal: the next process
finds it on disk only if it asks for the same. So the numbers of rows and tokens are left open from the start, and
PyTorch is kept from finding open sizes by itself. PyTorch keeps graphs by code object, which all models of a class
share, and gives up when one has too many: so each model compiles functions of its own.

Private parts of torch are imported where blocks are compiled, and nowhere else; one that this torch lacks costs what
it is for, and a line in the log.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any

from ..switches import is_on

LIMIT = 64
"""Graphs of one function: batches, plans and uneven shares each may need one. PyTorch's 8 is soon used up."""
_OF_A_CALL = 8
"""As many as one request may need, at most: its branches, one row or more, its uneven shares."""


def with_own_code(function: Any) -> Any:
    """A function that does the same, with a code object of its own."""
    copied = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
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


log = logging.getLogger(__name__)

_Setting = Callable[[], contextlib.AbstractContextManager[Any]]


class Settings:
    """What torch.compile is told around whatever may compile.

    Args:
        options: of its backend. Those of a block come too late for a pass as early as ours in torch 2.6, so they hold
            all around.
        numbers: arguments that hold token indices; graphs leave these open, as they leave sizes.
    """

    def __init__(self, options: Mapping[str, Any], numbers: Iterable[str] = ()):
        self._settings = _usable(
            {
                "a limit of graphs": _graph_limits,
                "open sizes": _unequal_sizes,
                "passes": lambda: _inductor_options(dict(options)),
                **({"open numbers": partial(_open_numbers, tuple(numbers))} if numbers else {}),
            }
        )

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Inside, they hold."""
        with contextlib.ExitStack() as held:
            for setting in self._settings:
                held.enter_context(setting())
            yield


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


def _usable(settings: Mapping[str, _Setting]) -> list[_Setting]:
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
    """Token indices are any numbers: an argument that is one, or the first two items of the tuples in a list."""
    import torch.compiler.config

    sources = ",".join(rf"L\['{name}'\](\[\d+\]\[[01]\])?$" for name in names)
    return torch.compiler.config.patch(dynamic_sources=sources)  # type: ignore[attr-defined]


def _inductor_options(options: dict[str, Any]) -> contextlib.AbstractContextManager[Any]:
    import torch._inductor.config

    return torch._inductor.config.patch(options)
