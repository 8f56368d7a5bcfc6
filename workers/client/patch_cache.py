"""Which weight patches the pool holds already: a LoRA's tensors cross once, a change of its strength is some names."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from parallel_runtime.patching.patch_data import PatchSet, WeightPatches, as_bytes
from parallel_runtime.requests.requests import KeepPatches

from ..wire.tensors import in_pieces
from .mirror import Mirror
from .requests import Callbacks, Reply, ShouldCancel, Submission, never

MOST_SETS = 32
MOST_BYTES = 4 << 30
"""Of factors that the ranks keep, each of them on its host, beside those of the call at hand."""
PIECE = 64 << 20
"""Bytes that a job brings."""
_MOST_TENSORS = 1024


class PatchCache:
    """Of sets, each with its factors by their bytes, and of the factors, which several sets may have in common."""

    def __init__(self, submit: Callable[[Submission], Reply]):
        self._submit = submit
        self._sets: Mirror[str, dict[str, int]] = Mirror()
        self._factors: Mirror[str, None] = Mirror()

    def send(self, patches: WeightPatches, should_cancel: ShouldCancel = never) -> None:
        """Have patches in the pool; ParallelError where it has no ComfyUI to compute them, or died."""
        callbacks = Callbacks(should_cancel=should_cancel)
        try:
            for request, tensors in self._missing(patches):
                self._submit(Submission(request=request, tensors=tensors, callbacks=callbacks))
                for name in request.factors:
                    self._factors.hold(name, None)
        except BaseException:
            self.clear()  # whether the ranks have kept them is not certain
            raise

    def clear(self) -> None:
        """Trust nothing any more; the pool drops with the next request what it may still hold."""
        self._sets.doubt()
        self._factors.doubt()

    def _missing(self, patches: WeightPatches) -> Iterator[tuple[KeepPatches, dict[str, torch.Tensor]]]:
        """The requests, each with its tensors, after which the pool has these patches."""
        new = [each for each in patches.sets if each.name not in self._sets]
        if new:
            assert patches.comfyui is not None
            self._make_room([each.name for each in patches.sets], new)
            # Names, too, may be more than one message holds.
            dropped = self._untold()
            while len(dropped) == _MOST_TENSORS:
                yield KeepPatches(patches.comfyui, dropped=dropped), {}
                dropped = self._untold()
            factors = {
                name: as_bytes(factor)
                for each in new
                for name, factor in each.factors.items()
                if name not in self._factors
            }
            for piece in in_pieces(factors, PIECE, _MOST_TENSORS):
                yield KeepPatches(patches.comfyui, factors=tuple(piece), dropped=dropped), piece
                dropped = ()
            yield (
                KeepPatches(patches.comfyui, sets=tuple(each.name for each in new), dropped=dropped),
                {each.name: each.to_bytes() for each in new},
            )
        for each in patches.sets:
            self._sets.hold(each.name, {name: factor.nbytes for name, factor in each.factors.items()})

    def _untold(self) -> tuple[str, ...]:
        names = self._sets.untold(_MOST_TENSORS)
        return names + self._factors.untold(_MOST_TENSORS - len(names))

    def _make_room(self, needed: list[str], new: list[PatchSet]) -> None:
        """Drop the sets that were used longest ago, and factors that none is left of."""
        old = [name for name in self._sets if name not in needed]
        while old and (len(self._sets) >= MOST_SETS or self._size() > MOST_BYTES):
            self._sets.let_go(old.pop(0))
        used = {name for each in new for name in each.factors}.union(*self._sets.known())
        self._factors.let_go(*(name for name in self._factors if name not in used))

    def _size(self) -> int:
        return sum({name: size for factors in self._sets.known() for name, size in factors.items()}.values())
