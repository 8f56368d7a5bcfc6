"""Parameters of diffusers' network as the weights of ComfyUI's that patches are made for: rules, both ways."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ..networks.diffusers.spec import WeightRule
from .checkpoint import Checkpoint

_RENAMED = ((".scale", ".weight"),)
"""Ends of names in files, and of the same in newer ComfyUIs."""


class OriginalWeights:
    """Which parameters of diffusers' class a weight of ComfyUI's network consists of.

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


def original_rules(checkpoint: Checkpoint) -> list[WeightRule]:
    """The rules from ComfyUI's names to parameters."""
    return list(checkpoint.spec.keys.weight_rules({name: info.shape for name, info in checkpoint.header.items()}))


def _swap_back(tensor: torch.Tensor) -> torch.Tensor:
    rest = tensor.shape[0] // 2  # torch.chunk has made the first half the longer one, and it stands last
    return torch.cat([tensor[rest:], tensor[:rest]])
