"""The authors' names of a family's tensors, and diffusers' names of the same, told as data in keys/*.json.

A pattern is a key in which `*` stands for a block's number ("double_blocks.*.img_mlp.0.weight"), or `last` for that of
the last block of the list, whose rule then goes before the `*` one. docs/derive_key_rules.py makes the files.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

_FOLDER = Path(__file__).with_name("keys")
_RENAMED = ((".scale", ".weight"),)
"""Ends of names in files, and of the same in newer ComfyUIs."""
_DIGITS = 10
"""Of a block's number, fewer than so many."""


@dataclass(frozen=True)
class TensorInfo:
    """One entry of a safetensors header: shape, dtype name as safetensors spells it ("BF16", "F32", ...)."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class WeightRule:
    """One diffusers parameter out of one tensor of the original file.

    Args:
        target: parameter name in the diffusers transformer.
        source: key in the original layout (without a prefix such as `model.diffusion_model.`).
        rows: (start, length) on dim 0 of the source, for fused projections; None takes all of it.
        swap_halves: the two halves of dim 0 change places (scale and shift of the final modulation).
    """

    target: str
    source: str
    rows: tuple[int, int] | None = None
    swap_halves: bool = False


@dataclass(frozen=True)
class KeyRules:
    """One family's.

    Args:
        parts: source pattern -> its targets in the order of their rows, each with its share of them.
        swapped: target patterns whose halves of dim 0 change places (scale and shift of a modulation).
    """

    parts: Mapping[str, Mapping[str, int]]
    swapped: frozenset[str]

    @classmethod
    def read(cls, family: str) -> KeyRules:
        """What keys/`family`.json says."""
        data = json.loads((_FOLDER / f"{family}.json").read_text(encoding="utf-8"))
        alone = {**data["whole"], **data["by_hand"], **data["swapped"]}
        whole = {source: {target: 1} for source, target in alone.items()}
        return cls({**whole, **data["fused"]}, frozenset(data["swapped"].values()))

    def weight_rules(self, shapes: Mapping[str, Sequence[int]]) -> Iterator[WeightRule]:
        """The rule of each parameter, by diffusers' names and shapes; none for names that are not known."""
        last = _last_numbers(self._lists_with_a_last, shapes)
        for name, shape in shapes.items():
            pattern, number = _find(name, self._sources, last)
            if not pattern:
                continue
            source = self._sources[pattern]
            targets, rows = self.parts[source], None
            if len(targets) > 1 and shape:
                shares = list(targets.values())[: list(targets).index(pattern)]
                rows = (shape[0] * sum(shares) // targets[pattern], shape[0])
            yield WeightRule(name, _fill(source, number), rows, pattern in self.swapped)

    @cached_property
    def _sources(self) -> dict[str, str]:
        return {target: source for source, targets in self.parts.items() for target in targets}

    @cached_property
    def _lists_with_a_last(self) -> set[str]:
        """Block lists whose last block has a rule of its own."""
        return {pattern.split(".")[0] for pattern in self._sources if ".last." in pattern}


def _last_numbers(lists: Container[str], keys: Iterable[str]) -> dict[str, str]:
    """{block list: number of its last block}; lists that have none are left out."""
    last: dict[str, int] = {}
    for blocks, number, _ in (key.split(".", 2) for key in keys if key.count(".") > 1):
        if blocks in lists and number.isascii() and number.isdigit() and len(number) < _DIGITS:
            last[blocks] = max(last.get(blocks, 0), int(number))
    return {blocks: str(number) for blocks, number in last.items()}


def _find(key: str, patterns: Container[str], last: Mapping[str, str]) -> tuple[str, str]:
    """The pattern of a key and its block's number; "" where there is none."""
    blocks, _, rest = key.partition(".")
    number, _, rest = rest.partition(".")
    if rest and number.isascii() and number.isdigit():
        if number == last.get(blocks) and (pattern := f"{blocks}.last.{rest}") in patterns:
            return pattern, number
        if (pattern := f"{blocks}.*.{rest}") in patterns:
            return pattern, number
    return (key if key in patterns else ""), ""


def _fill(pattern: str, number: str) -> str:
    for mark in (".*.", ".last."):
        pattern = pattern.replace(mark, f".{number}.", 1)
    return pattern


class OriginalWeights:
    """Which of a network's own weights one of ComfyUI's names stands for.

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


def _swap_back(tensor: torch.Tensor) -> torch.Tensor:
    rest = tensor.shape[0] // 2  # torch.chunk has made the first half the longer one, and it stands last
    return torch.cat([tensor[rest:], tensor[:rest]])
