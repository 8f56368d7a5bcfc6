"""Forwards of modules that another code calls one by one, compiled: one graph for all modules of a class. One that
cannot be compiled runs as it is from then on, and the log says why."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch

from ..attention.operators import leave_open
from ..errors import first_line
from .compiler import our_passes, room, settings, with_own_code
from .host_watch import unwatched

log = logging.getLogger(__name__)

_ALIGNED = 16
"""Bytes: a graph may be made for tensors that begin so."""
Varying = Callable[[Sequence[Any], Mapping[str, Any]], Sequence[tuple[Any, int]]]
"""(args, kwargs) -> (value, dim): tensors, or lists and tuples with such, and a dim of theirs."""


class CompiledMethods:
    """Compiles forwards where they are called. Where weights are tensors as they are (`plain`), passes apply, and the
    numbers of rows and tokens are left open, so that another size needs no new graph, and another batch none but for
    the step from one row to several: torch.compile does not combine open sizes with quantised weights, which are
    tensors with tensors in them. `numbers`: see `settings`."""

    def __init__(self, plain: bool, backend: str = "inductor", numbers: Sequence[str] = ()):
        self._plain, self._backend = plain, backend
        self._options = {**(our_passes() if plain else {}), **_in_order()} if backend == "inductor" else {}
        self._settings = settings(self._options, numbers if plain else ())
        self._own: dict[Any, Callable[..., Any]] = {}
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self.refused: dict[Any, str] = {}
        """Forwards that run as they are, and why."""

    @property
    def room(self) -> int:
        """How many graphs each forward may still get; see `room`."""
        return room(self._own.values())

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """What must hold around every call, as any may be the first of its kind."""
        with contextlib.ExitStack() as held:
            for setting in self._settings:
                held.enter_context(setting())
            yield

    def call(
        self, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], varying: Varying,
        may_repeat: Callable[[], bool],
    ) -> Any:  # fmt: skip
        """Return forward(*args, **kwargs), of a bound method, compiled where that can be. `varying` tells what of the
        arguments differs in size from picture to picture; `may_repeat`, asked where a compiled call failed, whether it
        has done nothing yet that others see."""
        function = getattr(forward, "__func__", None)
        if function is None or function in self.refused:
            return forward(*args, **kwargs)
        if function not in self._compiled:
            self._own[function] = with_own_code(function)
            self._compiled[function] = torch.compile(
                self._own[function], fullgraph=True, dynamic=None, backend=self._backend, options=self._options or None
            )
        given = [_alone(each) for each in args], {name: _alone(each) for name, each in kwargs.items()}
        if self._plain:
            for value, dim in varying(*given):
                _leave_open(value, dim)
            for value in (*given[0], *given[1].values()):
                _leave_open(value, 0)  # rows of the batch
        try:
            with unwatched():
                return self._compiled[function](forward.__self__, *given[0], **given[1])  # type: ignore[attr-defined]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever the compiler raises; what the forward itself raises, it raises below
            if not may_repeat():
                raise
            cause = getattr(error, "inner_exception", None) or error  # of a backend, where torch has wrapped it
            self.refused[function] = f"{type(cause).__name__}: {first_line(cause)}"
            log.warning("%s runs as it is, as it cannot be compiled: %s", function.__qualname__, self.refused[function])
        try:
            return forward(*args, **kwargs)
        except Exception:
            del self.refused[function]  # nor does it run as it is: the arguments are to blame
            raise


def _in_order() -> dict[str, Any]:
    """That exchanges between ranks keep their order, where this torch might change it."""
    import torch._inductor.config

    return {"reorder_for_peak_memory": False} if hasattr(torch._inductor.config, "reorder_for_peak_memory") else {}


def _alone(value: Any) -> Any:
    """An argument whose tensors are no views to torch: of a view, a graph would depend on what it is a view of. Nor are
    they transposed, as the first block's tokens are where a convolution made them (Wan), nor somewhere in a memory, as
    those of a second rank are: either would need its own graph."""
    if isinstance(value, torch.Tensor):
        if value.ndim > 2 and value.stride(-1) != 1:
            value = value.contiguous()
        value = value.data if value._is_view() else value
        if value.ndim > 1 and value.shape[0] == 1 and value.stride(0) != value.shape[1] * value.stride(1):
            value = value.squeeze(0).unsqueeze(0)  # half of a joint tensor (1, tokens, ...) has the stride of the whole
        start = value.storage_offset() * value.element_size()
        if start and start % _ALIGNED == 0 and not (value.is_conj() or value.is_neg()):
            own = value.untyped_storage()[start : start + _reach(value)]
            value = value.new_empty(0).set_(own, 0, value.shape, value.stride())
        return value
    if type(value) in (list, tuple):
        return type(value)(_alone(each) for each in value)
    return value


def _reach(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first number to the end of its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size() if tensor.numel() else 0


def _leave_open(value: Any, dim: int) -> None:
    if isinstance(value, torch.Tensor):
        if -value.ndim <= dim < value.ndim and value.shape[dim] > 1:
            leave_open(value, dim % value.ndim)
    elif isinstance(value, list | tuple):
        for each in value:
            _leave_open(each, dim)
    elif is_dataclass(value):  # FLUX.2's modulation
        _leave_open(list(vars(value).values()), dim)
    elif isinstance(held := getattr(value, "data", None), torch.Tensor):  # LTX-2's timesteps
        _leave_open(held, dim)
