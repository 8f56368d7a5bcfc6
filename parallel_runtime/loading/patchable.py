"""Parameters of diffusers' network as the weights of ComfyUI's that patches are made for: rules, both ways."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import psutil
import torch

from .. import memory
from ..errors import RequestError
from ..networks.diffusers.call import TAKE_COMFYUIS
from ..networks.diffusers.spec import WeightRule
from ..said import said
from .checkpoint import Checkpoint

_RENAMED = ((".scale", ".weight"),)
"""Ends of names in files, and of the same in newer ComfyUIs."""


class OriginalWeights:
    """Which parameters a weight of ComfyUI's network consists of.

    Args:
        rules: of all parameters that this rank has; their sources are ComfyUI's names.
    """

    def __init__(self, rules: Iterable[WeightRule]):
        self._rules: dict[str, list[WeightRule]] = {}
        for rule in sorted(rules, key=lambda rule: rule.rows or (0, 0)):
            self._rules.setdefault(rule.source, []).append(rule)
        for old, new in _RENAMED:
            for source in [source for source in self._rules if source.endswith(old)]:
                self._rules.setdefault(source.removesuffix(old) + new, self._rules[source])

    def parameters(self, name: str) -> tuple[str, ...]:
        """Names of the parameters that a weight consists of; none where it is not here."""
        return tuple(rule.target for rule in self._rules.get(name, ()))

    def join(self, name: str, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The weight; a view of its parameter where it is one as it is."""
        parts = [_swap_back(parameters[rule.target]) if rule.swap_halves else parameters[rule.target]
                 for rule in self._rules[name]]  # fmt: skip
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def split(self, name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """What each parameter becomes; views of the weight but where halves change places."""
        return {rule.target: apply_rule(rule, weight) for rule in self._rules[name]}


def apply_rule(rule: WeightRule, tensor: torch.Tensor) -> torch.Tensor:
    """The parameter out of the file's tensor; a view of it unless halves change places."""
    if rule.rows is not None:
        start, length = rule.rows
        tensor = tensor[start : start + length]
    return torch.cat(tensor.chunk(2)[::-1]) if rule.swap_halves else tensor


def original_rules(checkpoint: Checkpoint, rules: Iterable[WeightRule]) -> list[WeightRule]:
    """The rules from ComfyUI's names to parameters, whichever names the file has.

    Args:
        rules: of the file.
    """
    if checkpoint.layout != "diffusers":
        return list(rules)
    return list(checkpoint.spec.keys.weight_rules({name: info.shape for name, info in checkpoint.header.items()}))


def _swap_back(tensor: torch.Tensor) -> torch.Tensor:
    rest = tensor.shape[0] // 2  # torch.chunk has made the first half the longer one, and it stands last
    return torch.cat([tensor[rest:], tensor[:rest]])


_LEFT_FREE = 0.35
"""Share of a device's memory that originals leave free; where it is not, they are read from the file again."""


class PatchableParameters(ABC):
    """See `Patchable` for the methods.

    Args:
        original: ComfyUI's names of what is here.
        tensors: by diffusers' names.
    """

    wraps_layers = False

    def __init__(self, original: OriginalWeights, device: torch.device):
        self.moved = False
        self._original = original
        self._device = device
        self._tensors: dict[str, torch.Tensor] = {}
        self._originals: dict[str, torch.Tensor] = {}

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See `Patchable`."""
        parts = [self._tensors[target].shape for target in self._original.parameters(name)]
        return (sum(part[0] for part in parts), *parts[0][1:]) if parts else None

    def owner(self, name: str) -> None:
        """The weights are plain."""
        return

    def wrap(self, layers: Mapping[str, tuple[Any, float]]) -> None:
        """A bypass is a part of the weights."""
        return

    def originals(self, names: Sequence[str], patched: Sequence[str]) -> dict[str, torch.Tensor]:
        """See `Patchable`."""
        changed = {target for name in patched for target in self._original.parameters(name)}
        targets = {target for name in names for target in self._original.parameters(name)}
        self._keep(sorted(targets - changed))
        found = {name: self._tensors[name].data for name in targets - changed}
        found |= {name: self._originals[name] for name in changed & self._originals.keys()}
        found |= self._read_again(sorted(changed - self._originals.keys()))
        return {name: self._original.join(name, found) for name in names}

    def write(self, name: str, weight: torch.Tensor) -> None:
        """See `Patchable`."""
        wanted = self.shape(name)
        if tuple(weight.shape) != wanted:
            raise RequestError(
                said(
                    "A LoRA makes {name} of the shape {shape}, where diffusers' class has {wanted}.",
                    name=name,
                    shape=tuple(weight.shape),
                    wanted=wanted,
                ),
                TAKE_COMFYUIS,
            )
        for target, part in self._original.split(name, weight).items():
            self._put(target, part)

    def put_back(self, name: str, original: torch.Tensor) -> None:
        """See `Patchable`."""
        self.write(name, original)
        for target in self._original.parameters(name):
            self._originals.pop(target, None)

    def forget_originals(self) -> None:
        """See `Patchable`."""
        self._originals.clear()

    def spare(self) -> None:
        """See `Patchable`: they are read from the file again."""
        self._originals.clear()

    def can_keep(self, weight: torch.Tensor) -> bool:
        """See `Patchable`."""
        return has_room([weight], self._device)

    @abstractmethod
    def _keep(self, targets: Sequence[str]) -> None:
        """Remember parameters that are about to be changed, if that is worth it."""

    @abstractmethod
    def _read_again(self, targets: Sequence[str]) -> dict[str, torch.Tensor]:
        """What the file has, of parameters that were not kept."""

    @abstractmethod
    def _put(self, target: str, value: torch.Tensor) -> None:
        """Give a parameter another value."""


def has_room(tensors: Iterable[torch.Tensor], device: torch.device) -> bool:
    """Whether a device can keep copies of tensors, and still have memory for runs."""
    wanted = sum(tensor.nbytes for tensor in tensors)
    on_gpu = device.type == "cuda"
    total = torch.cuda.get_device_properties(device).total_memory if on_gpu else psutil.virtual_memory().total
    return memory.free_bytes(device) - wanted >= _LEFT_FREE * total
