"""Functions that one model alone compiles, so that graphs of other models do not count against it.

PyTorch keeps graphs by code object and gives up when one has too many. All models of a class share its code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

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
