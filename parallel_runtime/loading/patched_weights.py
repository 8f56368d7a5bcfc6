"""The patches that the weights of a rank have, and how they come to have others: every weight is computed anew from
what the file has, never from a patched one, and only where its patches change."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import psutil
import torch

from .. import memory
from ..patching.comfyui_patches import Computing, add_bypass, decode_value
from ..patching.patch_data import UNPATCHED, PatchSet, WeightPatches
from .loaded_weights import LoadedWeights
from .reading import OnBytes

_BATCH = 2 << 30  # bytes of weights, about, whose originals are had at once
_MOST_KEPT = 4  # states between which the hooks of a run's prompts change in every step, and whose weights are kept
_LEFT_FREE = 0.35  # share of a device's memory that originals leave free; else they are read from the file again


class PatchedWeights:
    """Weights with their patches."""

    def __init__(self, weights: LoadedWeights):
        self._weights = weights
        self._originals: dict[str, torch.Tensor] = {}
        self._device = weights.device
        self._has: dict[str, tuple[Any, Any]] = {}  # a weight's patches of the MODEL and of the hooks; None for none
        self._bypasses = ExitStack()
        self._wrapped: Mapping[str, Any] | None = {}
        self._now: tuple[str, str] | None = UNPATCHED.names
        self._kept: OrderedDict[tuple[str, str], dict[str, torch.Tensor]] = OrderedDict()

    def change(self, wanted: WeightPatches, on_bytes: OnBytes) -> None:
        """Have other patches; costs nothing where they are the same. RequestError: one does not fit the network.
        `on_bytes` hears of bytes of weights that are computed; where it raises, the next change goes on from there."""
        if wanted.names == self._now:
            return
        self._now = None
        weights, kept = self._weights, self._state(wanted)
        patches, hooks = wanted.patches.weights, wanted.hooks.weights
        asked = {name: (patches.get(name), hooks.get(name)) for name in {**patches, **hooks} if weights.keeps(name)}
        unlike = [name for name in {**asked, **self._has} if asked.get(name) != self._has.get(name)]
        computing = Computing(self._device, wanted.patches, wanted.hooks)
        *starts, total = itertools.accumulate((weights.now(each).shape.numel() * 4 for each in unlike), initial=0)

        def write(name: str, original: torch.Tensor | None) -> None:
            if (weight := kept.get(name)) is None:
                assert original is not None
                weight = computing.weight(name, original, weights.network.get_submodule(name.rpartition(".")[0]))
                if wanted.names in self._kept and has_room([weight], self._device):
                    kept[name] = weight
            self._has.setdefault(name, (None, None))  # if writing it fails, it is written again
            weights.put(name, weight)
            self._has[name] = asked[name]

        for _, batch in itertools.groupby(zip(unlike, starts, strict=True), lambda each: each[1] // _BATCH):
            begins = dict(batch)
            originals = self.originals([name for name in begins if name not in self._has or name not in kept])
            for name, start in begins.items():
                on_bytes(start, total)
                if name in asked:
                    write(name, originals.pop(name, None))
                else:
                    weights.put_file(name, originals.pop(name))
                    self._originals.pop(name, None)
                    del self._has[name]
        self._wrap(wanted.patches)
        if not self._has:
            self._originals.clear()
        weights.settle(wanted.names)
        self._now = wanted.names

    def forget(self) -> None:
        """The weights have left the device: those that come back are as in the file."""
        self._weights.moved |= bool(self._wrapped)
        self._bypasses.close()
        self._has.clear()
        self._wrapped = {}
        self._now = UNPATCHED.names
        self.make_room()

    def _state(self, wanted: WeightPatches) -> dict[str, torch.Tensor]:
        """Weights that are kept for such patches: of runs in which hooks come and go."""
        if not wanted.hooks.name and not self._kept:
            return {}
        if any(name != wanted.patches.name for name, _ in self._kept):
            self._kept.clear()
        kept = self._kept.setdefault(wanted.names, {})
        self._kept.move_to_end(wanted.names)
        while len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        return kept

    def make_room(self) -> None:
        """Let go of device memory that a next change would be quicker with; what is in place stays."""
        self._kept.clear()
        self._originals.clear()

    def _wrap(self, patches: PatchSet) -> None:
        if patches.bypass == self._wrapped:
            return
        self._weights.moved = True
        self._wrapped = None  # if it fails, layers are wrapped again, whatever is asked for
        self._bypasses.close()
        for name, (value, strength) in patches.bypass.items():
            layer, adapter = self._weights.network.get_submodule(name), decode_value(value, patches.factors)
            self._bypasses.callback(add_bypass(layer, name, adapter, strength, self._device))
        self._wrapped = patches.bypass

    def originals(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """What the file has of these weights, changed or not: kept where there is room, or read."""
        weights, changed = self._weights, self._has.keys()
        found = {name: weights.now(name).detach() for name in names if name not in changed and not weights.comes(name)}
        if has_room(found.values(), self._device):
            self._originals |= {name: weight.clone() for name, weight in found.items()}
        found |= {name: self._originals[name] for name in names if name in changed and name in self._originals}
        return found | weights.read_again(sorted(set(names) - found.keys()))


def has_room(tensors: Iterable[torch.Tensor], device: torch.device) -> bool:
    """Whether a device can keep copies of tensors, and still have memory for runs."""
    wanted = sum(tensor.nbytes for tensor in tensors)
    on_gpu = device.type == "cuda"
    total = torch.cuda.get_device_properties(device).total_memory if on_gpu else psutil.virtual_memory().total
    return memory.free_bytes(device) - wanted >= _LEFT_FREE * total
