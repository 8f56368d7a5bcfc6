"""What a forward sends from the host to the GPU and reads from it, none of which a CUDA graph can hold.

Networks send tables of positions, frequencies and sizes at every call, and read a number here and there: how many
tokens a mask leaves. A rehearsal keeps all of it, the forward is run with other values and must send and read the same,
and while it is recorded it must send the same once more, and gets what was kept. What was read is part of the recording
as a comparison: a replay for which it was something else is no result (`held`), so what the host made of it, sent and
decided, holds for every replay that is one. Nothing else that the host knows differs between two calls of one kind.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..switches import is_on
from .host_watch import Cross, Crossing, Watch, watching

Call = Callable[[list[torch.Tensor]], Any]


@dataclass(frozen=True)
class _Kept:
    """Something that crossed: `what` as of `Crossing`, the same on the GPU, which nobody else has, and on the host,
    where what was sent is bytes (N,)."""

    what: tuple[Any, ...]
    there: torch.Tensor
    here: Any


class HostTensors:
    """What one forward (`call`) sends and reads, in order. It must live as long as what was recorded with it. Where it
    is not watched, the three ways to run it are alike."""

    def __init__(self, call: Call, device: torch.device, watched: bool = True):
        self._call, self._device, self._watched = call, device, watched and is_on("sent")
        self._kept: list[_Kept] = []
        self._unlike = ""
        """What crossed first that was not what had been kept."""
        self.differ: torch.Tensor | None = None
        """Of a forward that reads numbers of the GPU, there: whether the last run of `give` read others."""

    def keep(self, given: list[torch.Tensor]) -> Any:
        """Run the forward, and keep what crosses."""
        return self._run(given, self._keep)

    def compare(self, given: list[torch.Tensor]) -> Any:
        """Run the forward, and see whether the same crosses for these values."""
        return self._run(given, self._compare)

    def give(self, given: list[torch.Tensor]) -> Any:
        """Run the forward, and give it what was kept in place of what crosses; RuntimeError where it sends something
        else than was kept, or did when it was compared."""
        self._check()
        if self.differ is not None:
            self.differ.zero_()
        output = self._run(given, self._give)
        self._check()
        return output

    def held(self) -> bool:
        """Whether the last run of `give`, or replay of it, is a result. Waits for it, where the forward reads."""
        return self.differ is None or not bool(self.differ)

    def _run(self, given: list[torch.Tensor], cross: Cross) -> Any:
        if not self._watched:
            return self._call(given)
        self._next = 0
        with watching(Watch(self._device, cross)):
            output = self._call(given)
        if self._next < len(self._kept):
            self._differs(f"nothing instead of {self._kept[self._next].what}")
        return output

    def _keep(self, crossing: Crossing) -> Any:
        made = crossing.make()
        self._next += 1
        if crossing.is_read:
            if self.differ is None:
                self.differ = torch.zeros((), dtype=torch.bool, device=self._device)
            self._kept.append(_Kept(crossing.what, crossing.source.clone(), made))
            return crossing.make()
        self._kept.append(_Kept(crossing.what, made.clone(), _bytes(crossing.source)))
        return made

    def _compare(self, crossing: Crossing) -> Any:
        made = crossing.make()
        self._known(crossing, made if crossing.is_read else _bytes(crossing.source))
        return made

    def _give(self, crossing: Crossing) -> Any:
        known = self._known(crossing, None if crossing.is_read else _bytes(crossing.source)) or self._check()
        if not crossing.is_read:
            return known.there if crossing.only_read else known.there.clone()
        assert self.differ is not None
        self.differ.logical_or_((crossing.source != known.there).any())
        return copy.deepcopy(known.here)  # a list, or a tensor of the host, may be written into

    def _known(self, crossing: Crossing, here: Any = None) -> _Kept | None:
        """What was kept in this place, where it is the same."""
        index, self._next = self._next, self._next + 1
        known = self._kept[index] if index < len(self._kept) else None
        if known is None or known.what != crossing.what:
            self._differs(f"{crossing.what} instead of {known.what if known else 'nothing'}")
            return None
        if here is None or _is_same(known.here, here):
            return known
        self._differs(f"other numbers in {crossing.what}")
        return None

    def _differs(self, how: str) -> None:
        self._unlike = self._unlike or f"{how}, in place {self._next} of {len(self._kept)}"

    def _check(self) -> Any:
        if self._unlike:
            raise RuntimeError(f"another call of its kind sends or reads {self._unlike}")


def _is_same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
