"""The weights of ComfyUI's own network, quantised ones among them, that patches are made for (patching/)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..patching.comfyui_patches import beside
from .kept_originals import FileNumbers, KeptOriginals
from .patchable import has_room


class PatchableNetwork(ABC):
    """See `Patchable` for the methods."""

    wraps_layers = True

    def __init__(self, device: torch.device, file: FileNumbers | None = None):
        self.device = device
        self.moved = False
        # Compiled blocks and recordings read these addresses; on the CPU there are none, and weights may be the file.
        self._in_place = device.type != "cpu"
        self._originals = KeptOriginals(device, file)
        self._bypasses: list[tuple[nn.Module, Any]] = []

    @property
    @abstractmethod
    def network(self) -> nn.Module:
        """On the device."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See `Patchable`."""
        layer, _, attribute = name.rpartition(".")
        try:
            weight = getattr(self.network.get_submodule(layer), attribute)
        except AttributeError:
            return None
        return tuple(weight.shape) if isinstance(weight, torch.Tensor) else None

    def owner(self, name: str) -> nn.Module:
        """See `Patchable`."""
        return self.network.get_submodule(name.rpartition(".")[0])

    def originals(self, names: Sequence[str], patched: Sequence[str]) -> dict[str, torch.Tensor]:
        """See `Patchable`."""
        new = {name: self._read(name) for name in names if name not in patched}
        if self._in_place and not has_room(new.values(), self.device):
            self._originals.put_away(new)
            return {name: new[name] if name in new else self._originals.get(name) for name in names}
        self._originals.keep({name: weight.detach().clone() for name, weight in new.items()} if self._in_place else new)
        return {name: self._originals.get(name) for name in names}

    def write(self, name: str, weight: torch.Tensor) -> None:
        """See `Patchable`. A weight may have another shape then."""
        now, weight = self._read(name), weight.to(self.device)
        if self._in_place and _alike(now, weight):
            with torch.no_grad():
                now.copy_(weight)  # not its `data`, which for a quantised weight has scales of its own
            return
        setattr(self.owner(name), name.rpartition(".")[2], nn.Parameter(weight, requires_grad=False))
        self.moved = True

    def put_back(self, name: str, original: torch.Tensor) -> None:
        """See `Patchable`."""
        if self._in_place:
            self.write(name, original)
        else:
            setattr(self.owner(name), name.rpartition(".")[2], original)
        self._originals.drop(name)

    def wrap(self, layers: Mapping[str, tuple[Any, float]]) -> None:
        """See `Patchable`: ComfyUI's own bypass, over each layer's forward."""
        import comfy.weight_adapter.bypass as bypass

        for layer, hook in reversed(self._bypasses):
            own = getattr(hook.original_forward, "__func__", None) is type(layer).forward
            hook.eject()
            if own:  # and not as an attribute: the block may be compiled for that already
                layer.__dict__.pop("forward", None)
        self._bypasses = []
        self.moved = True
        for name, (adapter, strength) in layers.items():
            layer = self.network.get_submodule(name)
            if isinstance(layer, nn.Linear):  # tried: a fault of ComfyUI's shall not cost the pool
                nothing = torch.zeros(1, 2, layer.out_features, device=self.device)
                x = torch.zeros(1, 2, layer.in_features, device=self.device)
                beside(name, adapter, strength, x, lambda x, given=nothing: given)  # type: ignore[misc]
            hook = bypass.BypassForwardHook(layer, adapter, multiplier=strength)
            hook.inject()
            self._bypasses.append((layer, hook))

    def forget_originals(self) -> None:
        """See `Patchable`."""
        self._originals.clear()

    def spare(self) -> None:
        """See `Patchable`."""
        if self.device.type != "cpu":
            self._originals.spare()

    def can_keep(self, weight: torch.Tensor) -> bool:
        """See `Patchable`."""
        return has_room([weight], self.device)

    def _read(self, name: str) -> torch.Tensor:
        weight: torch.Tensor = getattr(self.owner(name), name.rpartition(".")[2])
        return weight


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a copy of one to the other needs no other memory, quantised or not."""
    return _layout(one) == _layout(other)


def _layout(weight: Any) -> list[Any]:
    """Shapes and types; and numbers beside them, which a recording would have as they were."""
    scales = vars(getattr(weight, "_params", None) or _Plain())
    parts = [
        weight,
        getattr(weight, "_qdata", None),
        *(scales[name] for name in sorted(scales.keys() - {"orig_dtype"})),
    ]
    return [(part.shape, part.dtype) if isinstance(part, torch.Tensor) else part for part in parts]


class _Plain:
    """What a weight that is not quantised has in the place of scales."""
