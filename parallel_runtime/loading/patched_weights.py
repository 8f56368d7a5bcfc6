"""The patches that the weights of a rank have, and how they come to have others.

Every weight is computed anew from what the file has, never from a patched one, and only where its patches change.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import psutil
import torch
from torch import nn

from .. import memory
from ..errors import RequestError
from ..networks.diffusers.adapter import TAKE_COMFYUIS
from ..patching.comfyui_patches import Bypasses, Computing
from ..patching.patch_data import UNPATCHED, PatchSet, WeightPatches, decode_value
from ..said import said
from .loaded_weights import LoadedWeights

_BATCH = 2 << 30
"""Bytes of weights whose originals are had at once."""
_MOST_KEPT = 4
"""States between which the hooks of a run's prompts change in every step, and whose weights are kept."""

_LEFT_FREE = 0.35
"""Share of a device's memory that originals leave free; where it is not, they are read from the file again."""

Asked = tuple[Any, Any, Any]
"""A weight's patches of the MODEL, those of the hooks on top, and the bypass beside it; None for none."""


class PatchedWeights:
    """Weights with their patches."""

    def __init__(self, weights: LoadedWeights):
        self._weights = weights
        self._originals: dict[str, torch.Tensor] = {}
        self._bypasses = Bypasses()
        self._device = weights.device
        self._has: dict[str, Asked] = {}
        self._wrapped: Mapping[str, Any] | None = {}
        self._now: tuple[str, str] | None = UNPATCHED.names
        self._hooked = False
        self._kept: OrderedDict[tuple[str, str], dict[str, torch.Tensor]] = OrderedDict()

    def change(self, wanted: WeightPatches, on_bytes: Callable[[int, int], None]) -> None:
        """Have other patches; costs nothing where they are the same.

        Args:
            on_bytes: (bytes of weights that are computed, of how many); may raise to give up, and the next change
                goes on from there.

        Raises:
            RequestError: a patch that does not fit the network.
        """
        if wanted.names == self._now:
            return
        self._now = None
        kept = self._state(wanted)
        asked = self._asked(wanted)
        unlike = [name for name in {**asked, **self._has} if asked.get(name) != self._has.get(name)]
        computing = Computing(self._device, wanted.patches, wanted.hooks)
        sizes = {name: self._size(name) for name in unlike}
        total, done = sum(sizes.values()), 0
        for batch in _batches(unlike, sizes):
            needed = [name for name in batch if name not in self._has or name not in kept]
            originals = self.originals(needed, [name for name in needed if name in self._has])
            for name in batch:
                on_bytes(done, total)
                if name not in asked:
                    self.put_back(name, originals.pop(name))
                    del self._has[name]
                else:
                    self._write(name, asked[name], originals.pop(name, None), computing, kept)
                done += sizes[name]
        self._wrap(wanted.patches)
        if not self._has:
            self._originals.clear()
        self._now = wanted.names

    def forget(self) -> None:
        """The weights have left the device: those that come back are as in the file."""
        self._weights.moved |= bool(self._wrapped)
        self._bypasses.unwrap()
        self._has.clear()
        self._kept.clear()
        self._wrapped = {}
        self._now = UNPATCHED.names
        self._originals.clear()

    def _write(
        self,
        name: str,
        asked: Asked,
        original: torch.Tensor | None,
        computing: Computing,
        kept: dict[str, torch.Tensor],
    ) -> None:
        weight = kept.get(name)
        if weight is None:
            assert original is not None
            weight = computing.weight(name, original, self._owner(name))
            if asked[2] is not None:
                layer = name.rpartition(".")[0]
                inputs = self._shape(f"{layer}.weight")[1]
                weight = computing.folded(name, weight, layer, inputs)
            if self._hooked and has_room([weight], self._device):
                kept[name] = weight
        self._has.setdefault(name, (None, None, None))  # if writing it fails, it is written again
        self.write(name, weight)
        self._has[name] = asked

    def _state(self, wanted: WeightPatches) -> dict[str, torch.Tensor]:
        """Weights that are kept for such patches: of runs in which hooks come and go."""
        self._hooked = bool(wanted.hooks.name) or (self._hooked and any(self._kept))
        if not self._hooked or any(names[0] != wanted.patches.name for names in self._kept):
            self._kept.clear()
        if not self._hooked:
            return {}
        kept = self._kept.setdefault(wanted.names, {})
        self._kept.move_to_end(wanted.names)
        while len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        return kept

    def make_room(self) -> None:
        """Let go of device memory that a next change would be quicker with; what is in place stays."""
        self._kept.clear()
        self._originals.clear()

    def _asked(self, wanted: WeightPatches) -> dict[str, Asked]:
        """The patches of the weights that this rank has."""
        patches, hooks = wanted.patches.weights, wanted.hooks.weights
        bypass: dict[str, Any] = {}
        if not self._weights.wraps_layers:
            bypass = {
                f"{layer}.{kind}": value
                for layer, value in wanted.patches.bypass.items()
                for kind in ("weight", "bias")
            }
        return {
            name: (patches.get(name), hooks.get(name), bypass.get(name))
            for name in {**patches, **hooks, **bypass}
            if self.shape(name) is not None
        }

    def _wrap(self, patches: PatchSet) -> None:
        if not self._weights.wraps_layers or patches.bypass == self._wrapped:
            return
        layers = {
            layer: (decode_value(value, patches.factors), strength)
            for layer, (value, strength) in patches.bypass.items()
        }
        self._weights.moved = True
        self._wrapped = None  # if it fails, layers are wrapped again, whatever is asked for
        self._bypasses.wrap(self._weights.network, layers, self._device)
        self._wrapped = patches.bypass

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Of a weight as ComfyUI has it; None where this rank has nothing of it."""
        targets = self._weights.names.parameters(name)
        if not any(map(self._weights.keeps, targets)):
            return None
        shapes = [tuple(self._weights.now(target).shape) for target in targets]
        return shapes[0] if len(shapes) == 1 else (sum(each[0] for each in shapes), *shapes[0][1:])

    def _owner(self, name: str) -> nn.Module | None:
        """The layer with rules of its own for its weight; None where the weights are plain."""
        return self._weights.network.get_submodule(name.rpartition(".")[0]) if self._weights.wraps_layers else None

    def originals(self, names: Sequence[str], patched: Sequence[str]) -> dict[str, torch.Tensor]:
        """What the file has of these weights: kept on the device where that has room, and else had from the file again.

        Args:
            patched: those of them that are something else now.
        """
        weights = self._weights
        changed = {target for name in patched for target in weights.names.parameters(name)}
        targets = {target for name in names for target in weights.names.parameters(name)}
        found = {target: weights.now(target).detach() for target in targets - changed if not weights.comes(target)}
        if has_room(found.values(), self._device):
            self._originals |= {target: weight.clone() for target, weight in found.items()}
        found |= {target: self._originals[target] for target in changed & targets & self._originals.keys()}
        found |= weights.read_again(sorted(targets - found.keys()))
        return {name: weights.names.join(name, found) for name in names}

    def write(self, name: str, weight: torch.Tensor) -> None:
        """Put a patched weight in place.

        Raises:
            RequestError: it has another shape, and there is no place for it.
        """
        wanted = self.shape(name)
        if not self._weights.wraps_layers and tuple(weight.shape) != wanted:
            raise RequestError(
                said(
                    "A LoRA makes {name} of the shape {shape}, where diffusers' class has {wanted}.",
                    name=name,
                    shape=tuple(weight.shape),
                    wanted=wanted,
                ),
                TAKE_COMFYUIS,
            )
        for target, part in self._weights.names.split(name, weight).items():
            self._weights.put(target, part)

    def put_back(self, name: str, original: torch.Tensor) -> None:
        """Have what the file has again."""
        for target, part in self._weights.names.split(name, original).items():
            self._weights.put_file(target, part)
            self._originals.pop(target, None)

    def _shape(self, name: str) -> tuple[int, ...]:
        shape = self.shape(name)
        if shape is None:
            raise RequestError(
                said("The network has no {name}, to which a LoRA adds something.", name=name), "Remove the LoRA."
            )
        return shape

    def _size(self, name: str) -> int:
        return torch.Size(self._shape(name)).numel() * 4


def _batches(names: Sequence[str], sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """The names in their order, of so many bytes at once, or one."""
    batch: list[str] = []
    size = 0
    for name in names:
        if batch and size + sizes[name] > _BATCH:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += sizes[name]
    if batch:
        yield batch


def has_room(tensors: Iterable[torch.Tensor], device: torch.device) -> bool:
    """Whether a device can keep copies of tensors, and still have memory for runs."""
    wanted = sum(tensor.nbytes for tensor in tensors)
    on_gpu = device.type == "cuda"
    total = torch.cuda.get_device_properties(device).total_memory if on_gpu else psutil.virtual_memory().total
    return memory.free_bytes(device) - wanted >= _LEFT_FREE * total
