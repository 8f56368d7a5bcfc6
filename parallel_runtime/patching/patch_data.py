"""Patches of weights as plain data beside their tensors: what ComfyUI's ModelPatcher collects, on its way to the ranks.

A patch is ComfyUI's tuple (strength, value, strength of the model, offset, function). Its tensors, the factors, are
named by their contents, and so is a set of patches: what a rank keeps on its host is not sent again.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import NotLoadedError, RequestError
from ..requests.comfyui_code import ComfyuiCode
from ..requests.requests import KeepPatches
from ..requests.trees import flatten

PREFIX = "diffusion_model."  # what ComfyUI's names of a network's weights begin with
ADAPTERS, FUNCTIONS = "comfy.weight_adapter.", "comfy."  # modules whose adapters and functions the ranks have
_KINDS = ("diff", "set", "model_as_lora")

Tree = dict[str, Any]


@dataclass(frozen=True)
class PatchSet:
    """Patches of a network's weights."""

    name: str = ""  # of the contents; "" for no patches at all
    weights: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # ComfyUI's name without prefix -> its patches
    bypass: Mapping[str, Any] = field(default_factory=dict)
    """A layer's name -> [adapter, strength]: computed beside the layer, its weights left as they are."""
    factors: Mapping[str, torch.Tensor] = field(default_factory=dict)  # name -> tensor on the CPU

    def to_bytes(self) -> torch.Tensor:
        """All but the factors, (bytes,) uint8."""
        return torch.frombuffer(bytearray(_text(self.weights, self.bypass)), dtype=torch.uint8)


NO_PATCHES = PatchSet()


@dataclass(frozen=True)
class WeightPatches:
    """What a call asks of the weights: patches of the MODEL, those of hooks on top, and whose code computes them."""

    patches: PatchSet = NO_PATCHES
    hooks: PatchSet = NO_PATCHES
    comfyui: ComfyuiCode | None = None

    @property
    def names(self) -> tuple[str, str]:
        """What the ranks know it by."""
        return self.patches.name, self.hooks.name

    @property
    def sets(self) -> tuple[PatchSet, ...]:
        """Those that there are."""
        return tuple(each for each in (self.patches, self.hooks) if each.name)


UNPATCHED = WeightPatches()


class Encoder:
    """Makes sets. Remembers the names of tensors that live on, such as those of a LoRA file that a node has read."""

    def __init__(self) -> None:
        self._names: Any = WeakTensorKeyDictionary()

    def encode(
        self, patches: Mapping[str, Sequence[Sequence[Any]]], bypass: Mapping[str, tuple[Any, float]] | None = None
    ) -> PatchSet:
        """A set, of patches of ComfyUI's ModelPatcher by its names, and of a layer's name -> adapter and strength.
        RequestError: the ranks could not compute one of them, which it names."""
        if not patches and not bypass:
            return NO_PATCHES
        factors: dict[str, torch.Tensor] = {}
        weights = {_inside(key): [self._patch(each, factors) for each in given] for key, given in patches.items()}
        adapters = {_inside(key): each for key, each in (bypass or {}).items()}
        aside = {key: [self._value(each, factors), float(strength)] for key, (each, strength) in adapters.items()}
        return PatchSet(hashlib.sha256(_text(weights, aside)).hexdigest()[:32], weights, aside, factors)

    def _patch(self, patch: Sequence[Any], factors: dict[str, torch.Tensor]) -> list[Any]:
        strength, value, strength_model, offset, function = patch
        tree = self._value(value, factors)
        named = None if function is None else _name_of(function)
        return [float(strength), tree, float(strength_model), None if offset is None else list(offset), named]

    def _value(self, value: Any, factors: dict[str, torch.Tensor]) -> Tree:
        made, content = _read(value)
        tensors = list[torch.Tensor]()
        try:
            tree = flatten(content, tensors)
        except TypeError as error:
            raise _refusal(f"a weight patch that holds {error}") from error
        return {"made": made, "tree": tree, "tensors": [self._factor(each, factors) for each in tensors]}

    def _factor(self, tensor: torch.Tensor, factors: dict[str, torch.Tensor]) -> list[Any]:
        version = 0 if tensor.is_inference() else tensor._version
        if tensor.is_meta:
            raise _refusal("a weight patch made of a model whose weights are in the workers")
        known = self._names.get(tensor)
        if known is None or known[0] != version:
            digest = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(as_bytes(tensor.cpu()).numpy().data)
            known = self._names[tensor] = (version, digest.hexdigest()[:32])
        factors[known[1]] = tensor
        return [known[1], str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def check_patches(patches: Mapping[Any, Any]) -> None:
    """RequestError, which says what it is, for what the ranks could not compute, before its tensors are looked at; for
    the node that adds it. Patches are ComfyUI's name, or a tuple of it with offset and function -> value."""
    for key, value in patches.items():
        _inside(key if isinstance(key, str) else key[0])
        _read(value)
        if not isinstance(key, str) and len(key) > 2 and key[2] is not None:
            _name_of(key[2])


def read_set(name: str, content: torch.Tensor, factors: Mapping[str, torch.Tensor]) -> PatchSet:
    """The set whose `to_bytes` gave the content. RequestError: it is not what its name says, or a factor is missing."""
    text = content.cpu().numpy().tobytes()
    if hashlib.sha256(text).hexdigest()[:32] != name:
        raise RequestError("The workers were sent weight patches that are not what they say.", "Report this.")
    data = json.loads(text)
    values = [patch[1] for patches in data["weights"].values() for patch in patches]
    values += [value for value, _ in data["bypass"].values()]
    named = {factor for value in values for factor, _, _ in value["tensors"]}
    if missing := named - factors.keys():
        what = "{missing} tensors of weight patches did not come to the workers."
        raise RequestError(what, "Report this.", missing=len(missing))
    return PatchSet(name, data["weights"], data["bypass"], {factor: factors[factor] for factor in named})


class PatchStore:
    """Sets of patches and their factors, on the host: the device has those of a moment only."""

    def __init__(self) -> None:
        self._factors: dict[str, torch.Tensor] = {}
        self._sets: dict[str, PatchSet] = {}

    def keep(self, request: KeepPatches, tensors: Mapping[str, torch.Tensor]) -> None:
        """Do what a request says. Raises as `read_set`."""
        if request.kept is not None:
            self._sets = {name: each for name, each in self._sets.items() if name in request.kept}
            used = {factor for each in self._sets.values() for factor in each.factors}
            self._factors = {name: factor for name, factor in self._factors.items() if name in used}
        for name in request.factors:
            # A copy of its own: what the tensors came in goes. By this thread alone, as there are hundreds.
            self._factors[name] = torch.from_numpy(as_bytes(tensors[name].cpu()).numpy().copy())
        for name in request.sets:
            self._sets[name] = read_set(name, tensors[name], self._factors)

    def find(self, names: Sequence[str]) -> WeightPatches:
        """The patches of a request. NotLoadedError: they are not here."""
        if any(name and name not in self._sets for name in names):
            raise NotLoadedError("The workers do not have the LoRA's weights.", "Queue the prompt again.")
        patches, hooks = (self._sets[name] if name else NO_PATCHES for name in names)
        return WeightPatches(patches, hooks)


def _text(weights: Mapping[str, Any], bypass: Mapping[str, Any]) -> bytes:
    return json.dumps({"weights": weights, "bypass": bypass}, sort_keys=True, separators=(",", ":")).encode()


def _inside(key: str) -> str:
    if not key.startswith(PREFIX):
        raise _refusal(f"a patch of {key}, which is outside of the transformer")
    return key.removeprefix(PREFIX)


def _read(value: Any) -> tuple[str, Any]:
    """(name of the adapter's class or "", what is in the value)."""
    if isinstance(value, list):
        raise _refusal("a merge with another model")
    if isinstance(value, tuple):
        if len(value) == 2 and value[0] not in _KINDS:
            raise _refusal(f"a weight patch of the kind {value[0]!r}")
        return "", value
    if isinstance(value, torch.nn.Module) or not hasattr(value, "weights"):
        raise _refusal(f"a weight patch of the class {type(value).__module__}.{type(value).__name__}")
    made = _name_of(type(value), ADAPTERS)
    weights = value.weights
    return made, tuple(weights) if isinstance(weights, (list, tuple)) else weights


def _name_of(thing: Any, inside: str = FUNCTIONS) -> str:
    name = f"{thing.__module__}:{thing.__qualname__}"
    known = thing.__module__.startswith(inside) and "<" not in name
    if not known or getattr(importlib.import_module(thing.__module__), thing.__qualname__, None) is not thing:
        raise _refusal(f"a weight patch of the node pack's own ({name})")
    return name


def _refusal(what: str) -> RequestError:
    text = "The workers cannot carry {what}."
    return RequestError(text, "Remove the node that adds it, or load the model with Load Diffusion Model.", what=what)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes, (bytes,) uint8."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
