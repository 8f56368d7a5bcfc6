"""Which weight patches the pool holds already: a LoRA's tensors cross once, a change of its strength is some names."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import torch

from parallel_runtime.patching.patch_data import PatchSet, WeightPatches, as_bytes
from parallel_runtime.requests.requests import KeepPatches

from ..wire.tensors import in_pieces
from .requests import Reply, Submission

MOST_SETS = 32
MOST_BYTES = 4 << 30
"""Of factors that the ranks keep, each of them on its host, beside those of the call at hand."""
PIECE = 64 << 20
"""Bytes that a job brings."""
_MOST_TENSORS = 1024


class PatchCache:
    """Of sets, by their last use, each with its factors by their bytes; several sets may have factors in common."""

    def __init__(self, submit: Callable[[Submission], Reply]):
        self._submit = submit
        self._sets: OrderedDict[str, dict[str, int]] = OrderedDict()

    def send(self, patches: WeightPatches) -> None:
        """Have patches in the pool; ParallelError where it has no ComfyUI to compute them, or died."""
        if new := [each for each in patches.sets if each.name not in self._sets]:
            self._make_room([each.name for each in patches.sets])
            for request, tensors in self._requests(patches, new):  # where one fails, ranks have more than counts
                self._submit(Submission(request=request, tensors=tensors))
        for each in patches.sets:
            self._sets[each.name] = {name: factor.nbytes for name, factor in each.factors.items()}
            self._sets.move_to_end(each.name)

    def clear(self) -> None:
        """Trust nothing any more; the pool drops with the next request what it may still hold."""
        self._sets.clear()

    def _requests(
        self, patches: WeightPatches, new: Sequence[PatchSet]
    ) -> Iterator[tuple[KeepPatches, dict[str, torch.Tensor]]]:
        """What has the pool keep new sets beside those that it has. The first says which stay."""
        assert patches.comfyui is not None
        known = {name for factors in self._sets.values() for name in factors}
        factors = {
            name: as_bytes(factor.cpu()) for each in new for name, factor in each.factors.items() if name not in known
        }
        kept: tuple[str, ...] | None = tuple(self._sets)
        for piece in in_pieces(factors, PIECE, _MOST_TENSORS):
            yield KeepPatches(patches.comfyui, factors=tuple(piece), kept=kept), piece
            kept = None
        sets = {each.name: each.to_bytes() for each in new}
        yield KeepPatches(patches.comfyui, sets=tuple(sets), kept=kept), sets

    def _make_room(self, needed: Sequence[str]) -> None:
        """Count no longer on the sets that were used longest ago."""
        old = [name for name in self._sets if name not in needed]
        while old and (len(self._sets) >= MOST_SETS or self._size() > MOST_BYTES):
            del self._sets[old.pop(0)]

    def _size(self) -> int:
        return sum({name: size for factors in self._sets.values() for name, size in factors.items()}.values())
