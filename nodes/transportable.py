"""What of a call travels to the pool, and the names of what does not. No ComfyUI needed: all arguments are plain data.
A call that would lose something on its way is refused (`option_obstacles`, `weight_obstacles`); a loop that would be
another in the pool than ComfyUI's runs per step (`loop_obstacles`, `condition_obstacles`, `call_obstacles`)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from parallel_runtime.errors import RequestError
from parallel_runtime.networks.comfyui.node_rules import AROUND_GUIDER
from parallel_runtime.requests.conditioning import Shared
from parallel_runtime.requests.trees import flatten
from parallel_runtime.said import Said, said, together

from .carried_guidance import PLACES, is_carried
from .carried_patches import CarriedPatches, NotCarried, closure_of, foreign_functions
from .model_nodes import REFUSED
from .transformer_call import TransformerCall

_HERE_ALONE = {
    "uuids", "sigmas", "sample_sigmas", "prefetch_dynamic_vbars", "wrappers", "callbacks", "easycache", "ar_config",
    "context_window",
}  # fmt: skip
"""Options that ComfyUI's sampler reads and its networks do not, or that act before the network is called."""
_REBUILT = {"patches", "patches_replace", "animate2_cache"}  # travel by carried_patches.py
_WRITTEN = "ar_state"  # option that a network writes into: what a rank wrote would not come back
_ATTENTION = "optimized_attention_override"
_SENT = {"diffusion_model.params.default_ref_method", "diffusion_model.default_ref_method"}  # read at each call
_PLAIN_MODEL_OPTIONS = {"transformer_options", "disable_cfg1_optimization", "to_load_options"}
_MODEL_FUNCTIONS = {
    "sampler_cfg_function": said("a custom CFG function"),
    "sampler_pre_cfg_function": said("a function before CFG"),
    "sampler_post_cfg_function": said("a function after CFG"),
    "sampler_calc_cond_batch_function": said("a custom batching of the conditionings"),
    "model_function_wrapper": said("a wrapper around the model"),
    "denoise_mask_function": said("a function on the noise mask"),
    "context_handler": said("context windows"),
    "multigpu_clones": said("ComfyUI's own multi-GPU split"),
    "registered_hooks": said("conditioning hooks"),
}
_CONDITION_PARTS = {
    "area": said("an area"),
    "mask": said("a mask"),
    "control": said("a ControlNet"),
    "gligen": said("GLIGEN boxes"),
    "hooks": said("hooks"),
    "default": said("a default conditioning"),
    "timestep_start": said("a timestep range"),
    "timestep_end": said("a timestep range"),
}

AROUND_LOOP = {
    "wrappers": {"outer_sample", "prepare_sampling", "sampler_sample"},
    "callbacks": {
        "on_clone", "on_load_after", "on_detach_after", "on_cleanup", "on_pre_run", "on_register_all_hook_patches",
        "on_inject_model", "on_eject_model",
    },
}  # fmt: skip
"""Those of ComfyUI's kinds of wrappers and callbacks that act before or after a loop."""


def option_obstacles(options: Mapping[str, Any]) -> list[Said]:
    """Name what of `transformer_options` no data can say, beside the functions for the inside of the network."""
    override, found = options.get(_ATTENTION), []
    # ComfyUI's name for PyTorch's attention: what the ranks have is as exact.
    pytorchs = any(getattr(each, "__name__", "") == "attention_pytorch" for each in closure_of(override).values())
    if _is_set(override) and not pytorchs:
        found.append(said("another attention function (choose the kernel in Parallel Config)"))
    if _is_set(options.get(_WRITTEN)):
        found.append(said("the memory of an autoregressive sampler"))
    known = _REBUILT | _HERE_ALONE | {_WRITTEN, _ATTENTION}
    return found + [
        said("the transformer option {key}", key=key)
        for key in sorted(options.keys() - known)
        if _is_set(options[key]) and not _is_plain(options[key])
    ]


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `transformer_options` that ComfyUI's networks may read."""
    left = _REBUILT | _HERE_ALONE | {_ATTENTION}
    # False is said with a purpose: LTX-2's guidance switches attention between video and sound off by it.
    return {key: value for key, value in options.items() if key not in left and (_is_set(value) or value is False)}


def weight_obstacles(
    weight_wrappers: Mapping[str, Any],
    object_patches: Collection[str],
    injections: Collection[str],
    wrappers: Mapping[str, Mapping[Any, Any]],
) -> list[Said]:
    """Name the changes on a ModelPatcher that would have to reach the pool's weights or modules, and do not."""
    found = [said("wrapped weights")] if weight_wrappers else []
    found += [
        said("a replaced {name}", name=name)
        for name in object_patches
        if name.startswith("diffusion_model") and name not in _SENT
    ]
    if "manual_cast_dtype" in object_patches:
        found.append(said("another compute dtype (choose weight_dtype in Parallel Loader)"))
    found += [said("modules injected by {name}", name=name) for name in injections]
    if wrappers.get("apply_model", {}).get("torch.compile"):
        found.append(said("torch.compile (switch compile on in Parallel Config)"))
    return found


def loop_obstacles(model_options: Mapping[str, Any]) -> list[Said]:
    """Name what in ComfyUI's `model_options` acts between the steps, or inside them, and is not known to be harmless:
    running per step is always right. Functions and numbers for the inside of the network travel with a loop, too."""
    found = [
        _MODEL_FUNCTIONS.get(key, said("the model option {key}", key=key))
        for key, value in model_options.items()
        if key not in _PLAIN_MODEL_OPTIONS and _is_set(value) and not (key in PLACES and is_carried(value))
    ]
    options = model_options.get("transformer_options", {})
    found += option_obstacles(options)
    for key, template in (("wrappers", "a wrapper of a node ({name})"), ("callbacks", "a callback of a node ({name})")):
        inside = {kind: each for kind, each in options.get(key, {}).items() if kind not in AROUND_LOOP[key]}
        names = {
            name
            for kind, named in inside.items()
            for name, functions in named.items()
            if functions and not (kind == AROUND_GUIDER and is_carried(functions))
        }
        found += [said(template, name=name or "unnamed") for name in sorted(names, key=str)]
    return found


def condition_obstacles(conds: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Said]:
    """Name what in the conditionings (after ComfyUI has processed them) is more than a text for the whole picture."""
    found = []
    for name, entries in conds.items():
        if len(entries) > 1:
            found.append(said("{count} {name} conditionings", count=len(entries), name=name))
        for entry in entries:
            parts = {text for key, text in _CONDITION_PARTS.items() if entry.get(key) is not None}
            if entry.get("strength", 1.0) != 1.0:
                parts.add(said("a strength"))
            found += sorted(said("{part} on the {name} conditioning", part=part, name=name) for part in parts)
    return found


def call_obstacles(
    calls: Sequence[TransformerCall], latent_shape: Sequence[int], conds: Sequence[str], cfg: float | None
) -> list[Said]:
    """Name what in the calls of one evaluation is not a plain one of each branch on the whole latent (B, C, ...), of
    which x may have more channels; `conds` are by the index of their branch. `cfg` other than 1 needs a negative one;
    None of other guiders."""
    found = []
    batch = latent_shape[0]
    if len({call.x.shape[1] for call in calls}) > 1:
        found.append(said("extra input channels for one conditioning only"))
    for call in calls:
        branches = len(call.cond_or_uncond)
        shape, latent = tuple(call.x.shape), tuple(latent_shape)
        if (shape[0], *shape[2:]) != (branches * batch, *latent[2:]) or shape[1] < latent[1]:
            found.append(said("a model input of shape {shape} for a latent of {latent}", shape=shape, latent=latent))
        if branches > 1:
            found += [
                said("a shared input {name}", name=name)
                for name, value in call.conditioning.items()
                if not _is_batched(value, branches * batch)
            ]
    indices = [index for call in calls for index in call.cond_or_uncond]
    found += [
        said("{count} {name} evaluations a step", count=indices.count(index), name=name)
        for index, name in enumerate(conds)
        if indices.count(index) > 1
    ]
    if not indices or (cfg is not None and 0 not in indices):
        found.append(said("no positive conditioning"))
    elif cfg is not None and 1 not in indices and not math.isclose(cfg, 1.0):
        found.append(said("no negative conditioning for a CFG other than 1"))
    return found


def check_options(options: Mapping[str, Any]) -> None:
    """Look at a MODEL's `transformer_options` before a run; RequestError for what no rank takes, with its node."""
    if found := [*map(_functions_of, foreign_functions(options)), *option_obstacles(options)]:
        raise refusal(found)


def travelling(call: TransformerCall, functions: CarriedPatches) -> Mapping[str, Any]:
    """All of a call but x and timestep, as the network in the pool takes it; RequestError for what it does not take."""
    found, options = option_obstacles(call.options), plain_options(call.options)
    try:
        # Of several latents in one (video and audio), the first is the picture.
        options |= functions.carry(call.options, call.x if isinstance(call.x, torch.Tensor) else call.x[0])
    except NotCarried as error:
        found.insert(0, _functions_of(error.args[0]))
    if found:
        raise refusal(found)
    control = {} if call.control is None else {"control": call.control}
    return {**call.conditioning, **control, "transformer_options": Shared(options)}


def refusal(found: Iterable[Said]) -> RequestError:
    """The error of a MODEL that has what no rank could take."""
    fix = "Remove the node that adds it, or load the model with Load Diffusion Model."
    return RequestError("The workers cannot carry {what}.", fix, what=listed(found))


def listed(found: Iterable[Said]) -> Said:
    """Obstacles as one phrase, each once."""
    return together(dict.fromkeys(found), ", ")


def _functions_of(maker: Said) -> Said:
    if (why := REFUSED.get(maker)) is None:
        return said("functions that {maker} sets inside of the model", maker=maker)
    return said("functions that {node} sets inside of the model, as {why}", node=str(maker), why=Said(why))


def _is_set(value: Any) -> bool:
    """Whether an option is there at all: an empty dict or list, None and False are ComfyUI's ways to say no."""
    if isinstance(value, (Mapping, list, tuple, frozenset)):
        return len(value) > 0
    return value is not None and value is not False


def _is_plain(value: Any) -> bool:
    try:
        flatten(value, [])
    except TypeError:
        return False
    return True


def _is_batched(value: Any, rows: int) -> bool:
    if isinstance(value, list):
        return all(_is_batched(item, rows) for item in value)
    return not isinstance(value, torch.Tensor) or (value.ndim > 0 and value.shape[0] == rows)
