"""Weights that patches are written to, and what they were before."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import psutil
import torch
from torch import nn

from .. import memory
from ..errors import RequestError
from ..networks.diffusers.call import TAKE_COMFYUIS
from ..said import said
from .comfyui_patches import beside


class Names(Protocol):
    """Which of a network's own weights one of ComfyUI's names stands for."""

    def parameters(self, name: str) -> tuple[str, ...]:
        """Their names; none where it is not here."""
        ...

    def join(self, name: str, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The weight that they make."""
        ...

    def split(self, name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """What each becomes."""
        ...


class OwnNames:
    """Those of ComfyUI's own class.

    Args:
        known: the network's.
    """

    def __init__(self, known: Iterable[str]):
        self._known = set(known)

    def parameters(self, name: str) -> tuple[str, ...]:
        """See `Names`."""
        return (name,) if name in self._known else ()

    def join(self, name: str, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See `Names`."""
        return parameters[name]

    def split(self, name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """See `Names`."""
        return {name: weight}


_LEFT_FREE = 0.35
"""Share of a device's memory that originals leave free; where it is not, they are read from the file again."""


class PatchableWeights(ABC):
    """Weights by ComfyUI's names of them, without prefix.

    Args:
        wraps_layers: layers take a bypass of their own, and weights of another shape; else a bypass becomes a part of
            their weights.
        moved: something was changed elsewhere than in place: what was recorded over these weights is void. Who reads it
            sets it back.
    """

    def __init__(self, device: torch.device, wraps_layers: bool):
        self.device = device
        self.wraps_layers = wraps_layers
        self.moved = False
        self._names: Names = OwnNames(())
        self._originals: dict[str, torch.Tensor] = {}
        self._bypasses: list[tuple[nn.Module, Any]] = []

    @property
    @abstractmethod
    def network(self) -> nn.Module:
        """With the weights."""

    @abstractmethod
    def now(self, target: str) -> torch.Tensor:
        """One of the network's weights as it is."""

    @abstractmethod
    def comes(self, target: str) -> bool:
        """It is here while its block runs, and not else."""

    @abstractmethod
    def keeps(self, target: str) -> bool:
        """This rank has a part of it at least."""

    @abstractmethod
    def put(self, target: str, value: torch.Tensor) -> None:
        """Give it other numbers: in place where they have room there."""

    @abstractmethod
    def put_file(self, target: str, original: torch.Tensor) -> None:
        """Give it the numbers of the file, where it was at first."""

    @abstractmethod
    def read_again(self, targets: Sequence[str]) -> dict[str, torch.Tensor]:
        """What the file has of these."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Of a weight as ComfyUI has it; None where this rank has nothing of it."""
        targets = self._names.parameters(name)
        if not any(map(self.keeps, targets)):
            return None
        shapes = [tuple(self.now(target).shape) for target in targets]
        return shapes[0] if len(shapes) == 1 else (sum(each[0] for each in shapes), *shapes[0][1:])

    def owner(self, name: str) -> nn.Module | None:
        """The layer with rules of its own for its weight; None where the weights are plain."""
        return self.network.get_submodule(name.rpartition(".")[0]) if self.wraps_layers else None

    def originals(self, names: Sequence[str], patched: Sequence[str]) -> dict[str, torch.Tensor]:
        """What the file has of these weights: kept on the device where that has room, and else had from the file again.

        Args:
            patched: those of them that are something else now.
        """
        changed = {target for name in patched for target in self._names.parameters(name)}
        targets = {target for name in names for target in self._names.parameters(name)}
        found = {target: self.now(target).detach() for target in targets - changed if not self.comes(target)}
        if has_room(found.values(), self.device):
            self._originals |= {target: weight.clone() for target, weight in found.items()}
        found |= {target: self._originals[target] for target in changed & targets & self._originals.keys()}
        found |= self.read_again(sorted(targets - found.keys()))
        return {name: self._names.join(name, found) for name in names}

    def write(self, name: str, weight: torch.Tensor) -> None:
        """Put a patched weight in place.

        Raises:
            RequestError: it has another shape, and there is no place for it.
        """
        wanted = self.shape(name)
        if not self.wraps_layers and tuple(weight.shape) != wanted:
            raise RequestError(
                said(
                    "A LoRA makes {name} of the shape {shape}, where diffusers' class has {wanted}.",
                    name=name,
                    shape=tuple(weight.shape),
                    wanted=wanted,
                ),
                TAKE_COMFYUIS,
            )
        for target, part in self._names.split(name, weight).items():
            self.put(target, part)

    def put_back(self, name: str, original: torch.Tensor) -> None:
        """Have what the file has again."""
        for target, part in self._names.split(name, original).items():
            self.put_file(target, part)
            self._originals.pop(target, None)

    def wrap(self, layers: Mapping[str, tuple[Any, float]]) -> None:
        """Give layers a bypass, ComfyUI's own over each forward: name -> adapter and strength. Those of before go."""
        import comfy.weight_adapter.bypass as bypass

        self.unwrap()
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

    def unwrap(self) -> None:
        """No layer has a bypass."""
        for layer, hook in reversed(self._bypasses):
            own = getattr(hook.original_forward, "__func__", None) is type(layer).forward
            hook.eject()
            if own:  # and not as an attribute: the block may be compiled for that already
                layer.__dict__.pop("forward", None)
        self._bypasses = []

    def spare(self) -> None:
        """Let originals leave the device: they are had from the file again."""
        self._originals.clear()

    def can_keep(self, weight: torch.Tensor) -> bool:
        """Whether the device has memory for a copy beside that of the runs."""
        return has_room([weight], self.device)


def has_room(tensors: Iterable[torch.Tensor], device: torch.device) -> bool:
    """Whether a device can keep copies of tensors, and still have memory for runs."""
    wanted = sum(tensor.nbytes for tensor in tensors)
    on_gpu = device.type == "cuda"
    total = torch.cuda.get_device_properties(device).total_memory if on_gpu else psutil.virtual_memory().total
    return memory.free_bytes(device) - wanted >= _LEFT_FREE * total
