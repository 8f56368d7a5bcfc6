"""The functions that nodes have set for the inside of the network, as data for the ranks; what is no such data, named.
No ComfyUI needed: a function is known by the module and the name of its code (networks/comfyui/node_rules.py)."""

from __future__ import annotations

import copy
import itertools
import types
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from parallel_runtime.networks.comfyui.module_tree import class_name
from parallel_runtime.networks.comfyui.node_rules import rule_of
from parallel_runtime.requests.patches import CARRIED, FUNCTIONS, OBJECTS, PATCHES, REPLACED, TOGETHER, Attached, Patch
from parallel_runtime.said import Said, said

_BEYOND = 1 << 20  # index of a block that no network has
_NUMBERS = itertools.count(1)
_NETWORKS: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # of all MODELs: they share ranks
_RUNNING: weakref.WeakKeyDictionary[CarriedPatches, int] = weakref.WeakKeyDictionary()  # number when a run began


class NotCarried(Exception):
    """A function that no rank can make again; its argument says in words who made it."""


class CarriedPatches:
    """Turns the functions of one MODEL's options into patches, and remembers the numbers of objects."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Any, int]] = {}

    def begin(self) -> None:
        """A run begins: what patches remember of the last one counts no more."""
        self._kept.clear()
        _RUNNING[self] = next(_NUMBERS)

    def end(self) -> None:
        _RUNNING.pop(self, None)

    @property
    def since(self) -> int:
        """Objects with smaller numbers belong to runs that are over. Several MODELs run at once in one guider."""
        return min(_RUNNING.values(), default=0)

    def carry(self, options: Mapping[str, Any], x: torch.Tensor) -> dict[str, Any]:
        """The entry of `transformer_options` for a call with x (rows, ...), empty without functions; or NotCarried."""
        made = _Making(self, options, x)
        objects = {name: made.patch(value) for name, value in options.items() if _is_known(value)}
        patches = {
            kind: [patch for each in several if (patch := made.patch(each)) is not None]
            for kind, several in (options.get("patches") or {}).items()
        }
        replaced = [
            [kind, list(key) if isinstance(key, tuple) else key, made.patch(each)]
            for kind, several in (options.get("patches_replace") or {}).items()
            for key, each in several.items()
        ]
        entry = {OBJECTS: objects, PATCHES: {kind: each for kind, each in patches.items() if each}, REPLACED: replaced}
        entry = {name: value for name, value in entry.items() if value}
        return {CARRIED: {**entry, TOGETHER: made.together}} if entry else {}

    def kept_number(self, value: Any) -> int:
        """Of an object that remembers, for the run."""
        return self._kept.setdefault(id(value), (value, next(_NUMBERS)))[1]

    def network_number(self, module: Any) -> int:
        """Of a network beside the model, for as long as it lives."""
        return _NETWORKS.setdefault(module, next(_NUMBERS))


def foreign_functions(options: Mapping[str, Any]) -> list[Said]:
    """Who made the functions of a MODEL that the ranks cannot make again."""
    return [who_made(each) for each in _functions_in(options) if not _is_known(each)]


def act_always(options: Mapping[str, Any]) -> bool:
    """Whether no function for the inside of the network is left out at one of the run's sigmas."""
    sigmas = options.get("sample_sigmas")
    ranges = [each for function in _functions_in(options) for each in _ranges(function)]
    return not ranges or (
        sigmas is not None
        and all(least <= float(sigmas.min()) and float(sigmas.max()) <= largest for largest, least in ranges)
    )


def _functions_in(options: Mapping[str, Any]) -> list[Any]:
    several = [each for place in FUNCTIONS for each in (options.get(place) or {}).values()]
    return [function for each in several for function in (each.values() if isinstance(each, Mapping) else each)]


def _ranges(value: Any) -> Iterator[tuple[float, float]]:
    """Largest and least sigma of a function, and of those that it is made of."""
    rule = rule_of(code_of(value))
    if rule is None:
        return
    found = _values_of(value)
    if rule.between is not None:
        largest, least = (float(found[name]) for name in rule.between)
        yield largest, least
    for name in rule.values:
        if _is_known(found.get(name)):
            yield from _ranges(found[name])


class _Making:
    def __init__(self, owner: CarriedPatches, options: Mapping[str, Any], x: torch.Tensor):
        self._owner = owner
        self._sigmas = options.get("sigmas")
        self._x = x
        self._met: dict[int, tuple[Any, Patch | None]] = {}
        self.together = False

    def patch(self, value: Any) -> Patch | None:
        """A function or object as a patch; None where it does nothing at this sigma."""
        if id(value) in self._met:
            return self._met[id(value)][1]
        code = code_of(value)
        rule = rule_of(code)
        if rule is None:
            raise NotCarried(who_made(value))
        found = _values_of(value)
        if rule.between is not None and self._sigmas is not None:
            largest, least = (float(found[name]) for name in rule.between)
            if not least <= float(self._sigmas.max()) <= largest:
                self._met[id(value)] = value, None
                return None
        kept, since = (self._owner.kept_number(value), self._owner.since) if rule.remembers else (0, 0)
        made = Patch(code, len(self._met), kept, since)
        self._met[id(value)] = value, made
        if rule.encodes:
            _encode(value, self._x)
            found = _values_of(value)
        values: dict[str, Any] = {}
        for name in rule.values:
            given = found.get(name)
            if _is_known(given):
                given = self.patch(given)
                if given is None:  # what it belongs to does nothing now
                    self._met[id(value)] = value, None
                    return None
            values[name] = given if isinstance(given, Patch) else self._value(given)
        # Of a tensor that may have a row for each of a batch, nobody knows which of them are whose.
        tensors = [each for each in values.values() if isinstance(each, torch.Tensor)]
        self.together |= rule.together or any(each.ndim > 1 and each.shape[0] > 1 for each in tensors)
        return replace(made, values=values)

    def _value(self, value: Any) -> Any:
        if hasattr(value, "model") and isinstance(value.model, torch.nn.Module):
            return Attached(self._owner.network_number(value.model), value.model)
        if hasattr(value, "spacial_compression_encode"):  # of a VAE, what is asked of it in the ranks
            return {"spacial_compression": value.spacial_compression_encode()}
        if isinstance(value, torch.device):
            return {"device": "cpu" if value.type == "cpu" else "gpu"}
        return value


def who_made(value: Any) -> Said:
    """A function or object in the words of an error: what it is called, and where it comes from."""
    function = value if hasattr(value, "__qualname__") else type(value)
    owner = str(function.__qualname__).split(".")[0]
    before, _, folder = str(function.__module__).replace("/", ".").rpartition("custom_nodes.")
    if before:
        return said("{function} of {pack}", function=owner, pack=folder.split(".")[0])
    return said("{function}", function=owner)


def code_of(value: Any) -> str:
    """ "module:qualified name" of a function, or of an object's class."""
    return class_name(value if isinstance(value, types.FunctionType) else type(value))


def _is_known(value: Any) -> bool:
    return rule_of(code_of(value)) is not None


def _values_of(value: Any) -> dict[str, Any]:
    """Closure variables of a function, or attributes of an object."""
    return closure_of(value) if isinstance(value, types.FunctionType) else dict(vars(value))


def closure_of(function: Any) -> dict[str, Any]:
    """What a function remembers of where it was made; nothing of any other object."""
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if cells else ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _encode(patch: Any, x: torch.Tensor) -> None:
    """Have a patch take its picture through the VAE for x's size, as ComfyUI's code does when it is called."""
    trial, network = copy.copy(patch), copy.copy(patch.model_patch.model)
    network.control_block = lambda *_: 0.0  # which adds nothing
    trial.model_patch = types.SimpleNamespace(model=network)
    tokens = x.new_zeros(1, 1, 1)
    trial({"x": x, "img": tokens, "img_input": tokens, "txt": tokens, "block_index": _BEYOND})
    patch.encoded_image, patch.encoded_image_size = trial.encoded_image, trial.encoded_image_size
