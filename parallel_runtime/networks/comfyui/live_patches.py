"""Makes the functions of ComfyUI's nodes again in a rank, from ComfyUI's own code and the values that were sent."""

from __future__ import annotations

import copy
import importlib.abc
import importlib.util
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...errors import RequestError
from ...requests.comfyui_code import Guidance
from ...requests.patches import CARRIED, FUNCTIONS, OBJECTS, PATCHES, REPLACED, SIGMAS, Attached, Patch
from .node_rules import AROUND_GUIDER, GUIDANCE_RULES, PatchRule, rule_of

_BETWEEN = {"post_input", "double_block", "single_block", "noise_refiner"}  # which no network calls inside of a block


class LivePatches:
    """What a rank has made of patches; those that remember live on, the others are made for each call."""

    def __init__(self, device: torch.device):
        self._device = device
        self._kept: dict[int, Any] = {}

    def put_in(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """`transformer_options` with the functions where networks look for them; RequestError as of `make_guidance`."""
        carried = options.get(CARRIED)
        if not carried:
            return dict(options)
        made: dict[int, Any] = {}
        put = {name: value for name, value in options.items() if name != CARRIED}
        # The order of the client: values stand with the first patch of a number.
        put |= {name: self._make(patch, made) for name, patch in carried.get(OBJECTS, {}).items()}
        lists = carried.get(PATCHES, {}).items()
        patches = {kind: [self._make(patch, made) for patch in several] for kind, several in lists}
        replaced: dict[str, dict[Any, Any]] = {}
        for kind, key, patch in carried.get(REPLACED, []):
            replaced.setdefault(kind, {})[tuple(key) if isinstance(key, list) else key] = self._make(patch, made)
        put |= {name: value for name, value in zip(FUNCTIONS, (patches, replaced), strict=True) if value}
        # Those with a range of sigmas are sent within it alone; one of them asks without looking whether it is told.
        put.setdefault(SIGMAS, torch.zeros(1))
        return put

    def forget(self, since: float = math.inf) -> None:
        """Let go of what patches remember whose numbers are below this."""
        for number in [each for each in self._kept if each < since]:
            getattr(self._kept.pop(number), "free", lambda: None)()  # as ComfyUI calls it behind a run

    def _make(self, patch: Patch, made: dict[int, Any]) -> Any:
        if patch.number in made:
            return made[patch.number]
        rule = rule_of(patch.code)
        if rule is None:
            what = "The workers were sent {code}, which no worker may run."
            raise RequestError(what, "Report this.", code=patch.code)
        if patch.kept in self._kept:
            return made.setdefault(patch.number, self._kept[patch.kept])
        values = {name: self._value(value, made) for name, value in patch.values.items() if name in rule.values}
        values |= copy.deepcopy(dict(rule.fresh))
        if rule.between:
            values |= dict(zip(rule.between, (math.inf, -math.inf), strict=True))
        made[patch.number] = live = build(patch.code, rule, values)
        if patch.kept:
            self.forget(patch.since)  # of another run: it may be gigabytes, and would be taken for this one's
            self._kept[patch.kept] = live
        return live

    def _value(self, value: Any, made: dict[int, Any]) -> Any:
        if isinstance(value, Patch):
            return self._make(value, made)
        if isinstance(value, Attached):
            return types.SimpleNamespace(model=value.module)  # of ComfyUI's ModelPatcher, all that patches look at
        if isinstance(value, dict) and set(value) == {"spacial_compression"}:
            compression = value["spacial_compression"]
            return types.SimpleNamespace(spacial_compression_encode=lambda: compression)
        if isinstance(value, dict) and set(value) == {"device"}:
            return self._device if value["device"] == "gpu" else torch.device("cpu")
        return value


def act_between_blocks(carried: Mapping[str, Any]) -> bool:
    """Whether all functions are called between blocks."""
    kinds, replaced = set(carried.get(PATCHES, {})), {kind for kind, *_ in carried.get(REPLACED, [])}
    return kinds <= _BETWEEN and replaced <= {"dit"} and not carried.get(OBJECTS)  # of "dit" whole blocks are replaced


def build(code: str, rule: PatchRule, values: Mapping[str, Any]) -> Any:
    """A function over a closure of these values, or an object with them; RequestError where this ComfyUI has it not."""
    module, _, path = code.partition(":")
    owner, *inner = [name for name in path.split(".") if name != "<locals>"]
    try:
        if rule.uses:
            uses = {name: importlib.import_module(name) for name in rule.uses}
            inside = _code_in(_unimported(module), (owner, *inner))
        else:
            found = getattr(importlib.import_module(module), owner)
            if not inner:
                live = object.__new__(found)
                live.__dict__.update(values)
                return live
            if rule.owner:
                values = {**values, rule.owner: found}
            function = getattr(found, inner[0])
            function = getattr(function, "__func__", function)
            uses, inside = function.__globals__, _code_in(function.__code__, inner[1:])
        cells = tuple(types.CellType(values[variable]) for variable in inside.co_freevars)
        return types.FunctionType(inside, uses, inside.co_name, rule.defaults, cells)
    except (ImportError, AttributeError, KeyError, StopIteration) as error:
        what = "This ComfyUI has no {path} as {node} of another version has it: {error}."
        fix = "Remove {node}, or load the model with Load Diffusion Model."
        raise RequestError(what, fix, path=path, node=rule.node, error=error) from error


def _unimported(module: str) -> types.CodeType:
    """The code of a module's file, which does not run."""
    spec = importlib.util.find_spec(module)
    if spec is None or not isinstance(spec.loader, importlib.abc.InspectLoader):
        raise ImportError(f"there is no {module}")
    code = spec.loader.get_code(module)
    assert code is not None
    return code


def _code_in(code: types.CodeType, path: Sequence[str]) -> types.CodeType:
    """Of a class or function that is written inside of another one, by their names."""
    for name in path:
        code = next(each for each in code.co_consts if isinstance(each, types.CodeType) and each.co_name == name)
    return code


_ONE = ("sampler_cfg_function", "sampler_calc_cond_batch_function", "denoise_mask_function")
_SEVERAL = ("sampler_pre_cfg_function", "sampler_post_cfg_function", AROUND_GUIDER)


def make_guidance(functions: Sequence[Guidance], sampling: Any) -> dict[str, Any]:
    """Entries of ComfyUI's `model_options`; what a function has the network do inside stays data there, as it comes
    with a conditioning. RequestError for one that this ComfyUI does not have, or that no rank may run."""
    made: dict[str, Any] = {}
    for each in functions:
        rule = rule_of(each.code, GUIDANCE_RULES)
        inside = {name: str(each.values.get(name)) for name in rule.functions} if rule is not None else {}
        if rule is None or each.place not in (*_ONE, *_SEVERAL) or not all(map(rule_of, inside.values())):
            raise RequestError("The workers were sent {code}, which no worker may run.", "Report this.", code=each.code)
        values: dict[str, Any] = {name: each.values.get(name) for name in rule.values}
        values |= {name: Patch(code, number) for number, (name, code) in enumerate(inside.items())}
        if rule.sampling:
            values[rule.sampling] = sampling
        function = build(each.code, rule, values)
        made[each.place] = function if each.place in _ONE else [*made.get(each.place, ()), function]
    return made
