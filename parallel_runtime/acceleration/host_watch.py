"""Sees what crosses between host and GPU while code of others runs: tensors that are sent, numbers that are read."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..replaced import replaced

_RUNNING = threading.local()


@dataclass(frozen=True)
class Crossing:
    """Something on its way. `make` gives what comes of it: a tensor of the GPU, or of what is read a number, a list, or
    a tensor of the host."""

    source: torch.Tensor  # of the host that is sent, or of the GPU that is read
    what: tuple[Any, ...]  # all else that the result depends on
    make: Callable[[], Any]
    is_read: bool = False
    only_read: bool = False  # nobody writes into the result


Cross = Callable[[Crossing], Any]
"""Stands between: gives what comes of it."""


class Watch(TorchFunctionMode):
    """Sees the calls that send to devices of one kind, or read from them. What is not seen here (a call that torch
    makes inside of another) ends a recording as it would without."""

    def __init__(self, device: torch.device, cross: Cross):
        super().__init__()
        self._kind, self._cross = device.type, cross

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """As `func`, whatever it is."""
        named = dict(kwargs or {})
        if func in _MOVES:
            return self._moved(func, args, named)
        if func in _MAKES:
            return self._made(func, args, named)
        if func in _READS and self._is_there(args[0]):
            what = (func.__name__, *_told(args[0]))
            return self._cross(Crossing(args[0], what, lambda: func(*args, **named), is_read=True))
        if func is torch.Tensor.copy_ and self._is_there(args[0]):
            return func(args[0], *self._there(args[1:2]), *args[2:], **named)
        if func is torch.Tensor.__getitem__ and self._is_there(args[0]):
            return func(args[0], self._index(args[1], self._as_integers(args[1])))
        if func is torch.Tensor.__setitem__ and self._is_there(args[0]):
            return self._written(*args)
        return func(*args, **named)

    def _written(self, tensor: torch.Tensor, index: Any, value: Any) -> None:
        """Write into what an index chooses. A number is a tensor of the host to PyTorch, which it copies to the GPU,
        but where one mask chooses: there it is told to the kernel that fills, and nobody asks how many are chosen."""
        parts: Sequence[Any] = index if isinstance(index, tuple) else (index,)
        choosing = [each for each in parts if isinstance(each, list) or (isinstance(each, torch.Tensor) and each.ndim)]
        if type(value) not in (bool, int, float):
            parts = self._as_integers(index)
        elif len(choosing) != 1 or not _is_mask(choosing[0]):
            parts = self._as_integers(index)
            value = torch.full((), value, dtype=tensor.dtype, device=tensor.device)
        torch.Tensor.__setitem__(tensor, self._index(index, parts), *self._there([value]))

    def _index(self, given: Any, parts: Sequence[Any]) -> Any:
        """An index of these parts, those of the host sent; a tuple if there are several, or it was given as one."""
        sent = tuple(self._sent(each) if _on_host(each) and each.ndim else each for each in parts)
        return sent if isinstance(given, tuple) or len(sent) > 1 else sent[0]

    def _is_there(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.device.type == self._kind

    def _moved(self, func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        source, *how = args
        if not _on_host(source) or self._kind not in _targets(func, [*how, *named.values()]):
            return func(*args, **named)
        what = (func.__name__, *_told(source), *map(_said, how), *((name, _said(named[name])) for name in named))
        return self._cross(Crossing(source, what, lambda: func(*args, **named)))

    def _made(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        target = named.get("device")
        if func is torch.Tensor.new_tensor:
            target = args[0].device if target is None else target
        elif isinstance(args[0], torch.Tensor):
            return self._moved(func, args, named)
        if target is None or torch.device(target).type != self._kind:
            return func(*args, **named)
        source = func(*args, **{**named, "device": "cpu"})
        return self._cross(Crossing(source, (func.__name__, *_told(source), str(target)), lambda: source.to(target)))

    def _there(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Values with tensors of the host sent to the GPU."""
        return tuple(self._sent(each) if _on_host(each) else each for each in values)

    def _sent(self, source: torch.Tensor) -> Any:
        return self._cross(Crossing(source, _told(source), lambda: source.to(self._kind), only_read=True))

    def _as_integers(self, index: Any) -> list[Any]:
        """The parts of an index, of which masks and lists are the numbers of what they choose. A mask chooses as many
        as it says, which the host must know: that of the GPU is read."""
        parts: list[Any] = []
        for each in index if isinstance(index, tuple) else (index,):
            if isinstance(each, list) and each and all(type(number) in (int, bool) for number in each):
                each = torch.tensor(each, device="cpu")
            if _is_mask(each) and self._is_there(each):
                each = self._cross(Crossing(each, ("mask", *_told(each)), each.cpu, is_read=True))
            parts.extend(each.nonzero(as_tuple=True) if _is_mask(each) and _on_host(each) else [each])
        return parts


_MOVES = {torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.type_as}
_MAKES = {torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor}
_READS = {getattr(torch.Tensor, name) for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__")}


def _on_host(value: Any) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.device.type == "cpu"


def _is_mask(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.bool and value.ndim > 0


def _targets(func: Any, how: Sequence[Any]) -> set[str]:
    """Kinds of devices that arguments of a move name."""
    found = {each.device.type for each in how if isinstance(each, torch.Tensor)}
    found |= {torch.device(each).type for each in how if isinstance(each, str | torch.device)}
    if func is torch.Tensor.cuda or any(type(each) is int for each in how):
        found.add("cuda")
    return found


def _told(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.dtype, tuple(tensor.shape), tensor.stride())


def _said(value: Any) -> Any:
    return (value.dtype, value.device) if isinstance(value, torch.Tensor) else repr(value)


@contextlib.contextmanager
def watching(watch: TorchFunctionMode) -> Iterator[None]:
    """Inside, in this thread, `watch` sees calls of torch, but for those in `unwatched`."""
    with replaced(_RUNNING, "watch", watch), watch:
        yield


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Inside nobody looks on: torch's compiler would make other graphs where somebody does."""
    watch, _RUNNING.watch = getattr(_RUNNING, "watch", None), None
    if watch is not None:
        watch.__exit__(None, None, None)
    try:
        yield
    finally:
        if watch is not None:
            watch.__enter__()
        _RUNNING.watch = watch
