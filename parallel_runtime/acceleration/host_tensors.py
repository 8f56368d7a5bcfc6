"""Tensors that a forward makes on the host and sends to the GPU, which no CUDA graph can hold.

Networks of others send tables of positions, frequencies and sizes at every call. What is sent depends on nothing that
differs between the calls of one kind, or else nothing may be recorded: numbers of the device reach the host by
waiting for it alone, which a recording refuses, and all else is the kind of the call. It is seen to all the same: a
rehearsal keeps what it sends, the forward is run with other values and must send the same, and while it is recorded it
must send the same once more, and gets what was kept.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..switches import is_on

_RUNNING = threading.local()

Call = Callable[[list[torch.Tensor]], Any]


@dataclass(frozen=True)
class _Sent:
    """One tensor that was sent.

    Args:
        what: the kind of call that sent it.
        values: its bytes on the host, (N,).
        there: it on the device, which nobody else has.
    """

    what: tuple[Any, ...]
    values: torch.Tensor
    there: torch.Tensor


class HostTensors:
    """What one forward sends, in order. It must live as long as what was recorded with it.

    Args:
        call: the forward.
        device: that it sends to.
        watched: where not, the three ways to run it are alike.
    """

    def __init__(self, call: Call, device: torch.device, watched: bool = True):
        self._call = call
        self._watched = watched and is_on("sent")
        self.device = device
        self._sent: list[_Sent] = []
        self._alike = True

    def keep(self, given: list[torch.Tensor]) -> Any:
        """Run the forward, and keep what it sends."""
        self._sent.clear()
        return self._run(given, self._kept)

    def compare(self, given: list[torch.Tensor]) -> Any:
        """Run the forward, and see whether it sends the same for these values."""
        return self._run(given, self._compared)

    def give(self, given: list[torch.Tensor]) -> Any:
        """Run the forward, and give it what was kept in place of what it sends.

        Raises:
            RuntimeError: it sends something else than was kept, or did when it was compared.
        """
        self._see_to(self._alike)
        output = self._run(given, self._given)
        self._see_to(self._alike)
        return output

    def _run(self, given: list[torch.Tensor], send: Callable[[_Sending], torch.Tensor]) -> Any:
        if not self._watched:
            return self._call(given)
        self._next = 0
        with watching(_Watch(self.device, send)):
            output = self._call(given)
        self._alike &= self._next == len(self._sent)
        return output

    def _kept(self, sending: _Sending) -> torch.Tensor:
        self._next += 1
        made = sending.make()
        self._sent.append(_Sent(sending.what, _bytes(sending.source), made.clone()))
        return made

    def _compared(self, sending: _Sending) -> torch.Tensor:
        self._alike &= self._known(sending) is not None
        return sending.make()

    def _given(self, sending: _Sending) -> torch.Tensor:
        known = self._known(sending)
        self._see_to(known is not None)
        assert known is not None
        return known.there if sending.only_read else known.there.clone()

    def _known(self, sending: _Sending) -> _Sent | None:
        index, self._next = self._next, self._next + 1
        if index >= len(self._sent):
            return None
        known = self._sent[index]
        return known if known.what == sending.what and torch.equal(known.values, _bytes(sending.source)) else None

    def _see_to(self, alike: bool) -> None:
        if not alike:
            raise RuntimeError("it sends other values from the host in another call of its kind")


@dataclass(frozen=True)
class _Sending:
    """A tensor on its way.

    Args:
        source: on the host.
        what: all else that the result depends on.
        make: sends it.
        only_read: nobody writes into the result.
    """

    source: torch.Tensor
    what: tuple[Any, ...]
    make: Callable[[], torch.Tensor]
    only_read: bool = False


class _Watch(TorchFunctionMode):
    """Sees each call that sends a tensor from the host to a device.

    What is not seen here (a call that torch makes inside of another) ends a recording as it would without.

    Args:
        send: makes what the call returns, or uses.
    """

    def __init__(self, device: torch.device, send: Callable[[_Sending], torch.Tensor]):
        super().__init__()
        self._kind = device.type
        self._send = send

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """As `func`, whatever it is."""
        named = dict(kwargs or {})
        if func in _MOVES:
            return self._moved(func, args, named)
        if func in _MAKES:
            return self._made(func, args, named)
        if func is torch.Tensor.copy_ and self._is_there(args[0]):
            return func(args[0], *self._there(args[1:2]), *args[2:], **named)
        if func in _INDEXED and self._is_there(args[0]):
            parts = _as_integers(args[1])
            index = tuple(self._sent(each) if _on_host(each) and each.ndim else each for each in parts)
            as_given = index if isinstance(args[1], tuple) or len(index) > 1 else index[0]
            return func(args[0], as_given, *self._there(args[2:]), **named)
        return func(*args, **named)

    def _is_there(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.device.type == self._kind

    def _moved(self, func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        source, *how = args
        if not _on_host(source) or self._kind not in _targets(func, [*how, *named.values()]):
            return func(*args, **named)
        what = (func.__name__, *_told(source), *map(_said, how), *((name, _said(named[name])) for name in named))
        return self._send(_Sending(source, what, lambda: func(*args, **named)))

    def _made(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        target = named.get("device")
        if func is torch.Tensor.new_tensor:
            target = args[0].device if target is None else target
        elif isinstance(args[0], torch.Tensor):
            return self._moved(func, args, named)
        if target is None or torch.device(target).type != self._kind:
            return func(*args, **named)
        source = func(*args, **{**named, "device": "cpu"})
        return self._send(_Sending(source, (func.__name__, *_told(source), str(target)), lambda: source.to(target)))

    def _there(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Values with tensors of the host sent to the device."""
        return tuple(self._sent(each) if _on_host(each) else each for each in values)

    def _sent(self, source: torch.Tensor) -> torch.Tensor:
        return self._send(_Sending(source, _told(source), lambda: source.to(self._kind), only_read=True))


_MOVES = {torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.type_as}
_MAKES = {torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor}
_INDEXED = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}


def _on_host(value: Any) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.device.type == "cpu"


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


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _as_integers(index: Any) -> list[Any]:
    """The parts of an index, of which masks on the host, and lists, are the numbers of what they choose."""
    parts: list[Any] = []
    for each in index if isinstance(index, tuple) else (index,):
        if isinstance(each, list) and each and all(type(number) in (int, bool) for number in each):
            each = torch.tensor(each, device="cpu")
        if _on_host(each) and each.dtype is torch.bool and each.ndim:
            parts.extend(each.nonzero(as_tuple=True))
        else:
            parts.append(each)
    return parts


@contextlib.contextmanager
def watching(watch: TorchFunctionMode) -> Iterator[None]:
    """Inside, in this thread, `watch` sees calls of torch, but for those in `unwatched`."""
    _RUNNING.watch = watch
    try:
        with watch:
            yield
    finally:
        _RUNNING.watch = None


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Inside nobody looks on: torch's compiler would make other graphs where somebody does."""
    watch = getattr(_RUNNING, "watch", None)
    if watch is None:
        yield
        return
    _RUNNING.watch = None
    watch.__exit__(None, None, None)
    try:
        yield
    finally:
        watch.__enter__()
        _RUNNING.watch = watch
