"""Regional torch.compile: a transformer's repeated blocks, one graph for all of a kind, and what it is told.

A graph must not depend on what was compiled before it, or by coincidence on sizes that are equal: the next process
finds it on disk only if it asks for the same. So the numbers of rows and tokens are left open from the start, and
PyTorch is kept from finding open sizes by itself.

Private parts of torch are imported where blocks are compiled, and nowhere else; one that this torch lacks costs what
it is for, and a line in the log.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..attention.operators import leave_open, without_row_stride
from ..switches import is_on
from .own_graphs import LIMIT, room, with_own_code

log = logging.getLogger(__name__)

_Setting = Callable[[], contextlib.AbstractContextManager[Any]]


class CompiledBlocks:
    """Blocks that are compiled where they lie; each when it first runs."""

    def __init__(self, blocks: Sequence[nn.Module]):
        self._blocks = blocks
        self._options = rewriting()
        self._settings = Settings(self._options)
        self._own: dict[Any, Callable[..., Any]] = {}
        compiled: dict[Any, Callable[..., Any]] = {}
        self._calls: list[Any] = []
        for block in blocks:
            function: Any = type(block).forward
            if function not in compiled:
                self._own[function] = with_own_code(function)
                compiled[function] = torch.compile(self._own[function], fullgraph=True, options=self._options or None)
            self._calls.append(partial(_with_open_sizes, compiled[function], block))
        self.use(True)

    @property
    def room(self) -> int:
        """How many graphs each kind of block may still get; see `room`."""
        return room(self._own.values())

    def use(self, compiled: bool) -> None:
        """Run what is compiled, or the blocks as they are, from the next forward on."""
        for block, call in zip(self._blocks, self._calls, strict=True):
            block._compiled_call_impl = call if compiled else None  # what Module.compile sets

    def compiling(self) -> contextlib.AbstractContextManager[None]:
        """What must hold around every forward, as any may be the first of its kind."""
        return self._settings.hold()

    def undo(self) -> None:
        """Leave the blocks as they were."""
        self.use(False)


class Settings:
    """What torch.compile is told around whatever may compile.

    Args:
        options: of its backend. Those of a block come too late for a pass as early as ours in torch 2.6, so they hold
            all around.
    """

    def __init__(self, options: Mapping[str, Any]):
        self._settings = _usable(
            {
                "a limit of graphs": _graph_limits,
                "open sizes": _unequal_sizes,
                "rewrites": lambda: _inductor_options(dict(options)),
                "norms in one pass": _rows_at_once,
            }
        )

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Inside, they hold."""
        with contextlib.ExitStack() as held:
            for setting in self._settings:
                held.enter_context(setting())
            yield


def rewriting() -> dict[str, Any]:
    """Options by which torch.compile applies our rewrites, none where they are switched off, or this torch has no place
    for them."""
    if not is_on("rewrites"):
        return {}
    try:
        from .rewrites import Rewrites
    except (ImportError, AttributeError) as error:
        log.warning("Blocks are compiled without our rewrites: %s: %s", type(error).__name__, error)
        return {}
    return {"pre_grad_custom_pass": Rewrites()}


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


def _inductor_options(options: dict[str, Any]) -> contextlib.AbstractContextManager[Any]:
    import torch._inductor.config

    return torch._inductor.config.patch(options)


def _rows_at_once() -> contextlib.AbstractContextManager[Any]:
    from torch._inductor.virtualized import V

    from .reductions import RowsAtOnce

    return V.set_choices_handler(RowsAtOnce())


def _with_open_sizes(call: Callable[..., Any], block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call with the numbers of rows and tokens left open in every tensor that a block gets."""
    return call(block, *map(_opened, args), **{name: _opened(value) for name, value in kwargs.items()})


def _opened(argument: Any) -> Any:
    """(batch, tokens, ...), and (tokens, head dim) of a rotary embedding; of a modulation the batch."""
    if isinstance(argument, torch.Tensor):
        argument = without_row_stride(argument)
        if argument.dim() > 1:
            leave_open(argument, 0)
        if argument.dim() > 2:
            leave_open(argument, 1)
    elif type(argument) in (list, tuple):
        return type(argument)(map(_opened, argument))
    return argument
