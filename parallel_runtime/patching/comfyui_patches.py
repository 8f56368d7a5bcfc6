"""A patched weight, computed by ComfyUI's own functions in its order and its types. ComfyUI must be importable.

Patches of a quantised weight of a GGUF file stay beside it, and its layer adds them at each use, as with the pack's own
patcher: its blocks are nothing that a sum can be written back to.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import RequestError
from ..requests.trees import restore
from .patch_data import ADAPTERS, FUNCTIONS, PREFIX, PatchSet, Tree


def is_of_gguf(weight: torch.Tensor) -> bool:
    """A tensor of the pack's class, quantised or not."""
    return hasattr(weight, "tensor_type") and hasattr(weight, "tensor_shape")


def is_quantised(weight: Any) -> bool:
    """A tensor of the pack's class that holds blocks, and no numbers."""
    kind = getattr(weight, "tensor_type", None)
    return getattr(kind, "name", kind) not in (None, "F32", "F16")


MODULES = ("comfy.lora", "comfy.float", "comfy.utils", "comfy.model_patcher", "comfy.weight_adapter.bypass")
"""What this file imports when it is used."""


class Computing:
    """Computes patched weights on a device, by the MODEL's patches and then those of a conditioning's hooks."""

    def __init__(self, device: torch.device, patches: PatchSet, hooks: PatchSet):
        self._device, self._patches, self._hooks = device, patches, hooks

    def weight(self, name: str, base: torch.Tensor, owner: nn.Module) -> torch.Tensor:
        """One weight with all its patches; `name` is ComfyUI's without prefix, `base` as the file has it and not
        written to, `owner` the layer that has it, which may have rules of its own for quantised weights."""
        import comfy.model_management

        weight: Any = base
        if is_quantised(weight):
            given = [each for each in (self._patches, self._hooks) if name in each.weights]
            decoded = [patch for each in given for patch in decode_patches(each.weights[name], each.factors)]
            about = {"tensor_type": weight.tensor_type, "tensor_shape": weight.tensor_shape}
            return type(weight)(weight, **about, patches=[(decoded, PREFIX + name)])  # in the same memory
        # As ModelPatcher.patch_weight_to_device and ModelPatcher.patch_hook_weight_to_device do.
        usual = torch.float32 if is_of_gguf(base) else comfy.model_management.lora_compute_dtype(self._device)
        for patches, dtype in ((self._patches, usual), (self._hooks, torch.float32)):
            if name in patches.weights:
                weight = self._apply(name, weight, base, owner, patches, dtype)
        return weight

    def _apply(
        self, name: str, weight: torch.Tensor, base: torch.Tensor, owner: nn.Module, given: PatchSet, dtype: torch.dtype
    ) -> torch.Tensor:
        import comfy.float
        import comfy.lora
        import comfy.model_management

        attribute, key = name.rpartition(".")[2], PREFIX + name
        convert, put = (getattr(owner, f"{what}_{attribute}", None) for what in ("convert", "set"))
        value = comfy.model_management.cast_to_device(weight, self._device, dtype, copy=True)
        if convert is not None:
            value = convert(value, inplace=True)
        # What a patch would subtract from a whole model's weight (Create Hook Model as LoRA).
        original = {key: [(base, convert)]}
        patches = decode_patches(given.weights[name], given.factors)
        try:
            value = comfy.lora.calculate_weight(patches, value, key, original_weights=original)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            # ComfyUI writes the faults of LoRAs into its log and goes on; a patch that sets a weight just fails.
            what = "A patch does not fit the weight {name}, {shape}: {error}"
            fix = "Remove the LoRA, or choose one that was made for this model."
            raise RequestError(what, fix, name=name, shape=tuple(value.shape), error=error) from error
        if put is None:
            return comfy.float.stochastic_rounding(value, weight.dtype, seed=_seed(key))
        return put(value, inplace_update=False, seed=_seed(key), return_weight=True)

    def folded(self, name: str, weight: torch.Tensor, layer: str, inputs: int) -> torch.Tensor:
        """The weight or bias of a layer with which it gives what ComfyUI's bypass gives beside an unchanged one. An
        adapter's bypass is affine in what the layer gets, so it is computed once, on the unit vectors. `weight` is the
        layer's own, with its patches. RequestError: ComfyUI's adapter cannot do it."""
        import comfy.float
        import comfy.lora

        value, strength = self._patches.bypass[layer]
        adapter = decode_value(value, self._patches.factors)
        own = weight.to(self._device, torch.float32)
        if own.ndim > 2:  # a kernel: what a patch of the weight gives
            result = comfy.lora.calculate_weight([(strength, adapter, 1.0, None, None)], own.clone(), name)
        elif own.ndim == 2:
            given = torch.eye(inputs, device=self._device)
            result = beside(layer, adapter, strength, given, lambda x: F.linear(x, own)).T
        else:
            given = torch.zeros(1, inputs, device=self._device)
            result = beside(layer, adapter, strength, given, lambda x: own.repeat(x.shape[0], 1))[0]
        return comfy.float.stochastic_rounding(result.contiguous(), weight.dtype, seed=_seed(PREFIX + name))


def decode_patches(patches: Sequence[Any], factors: Mapping[str, torch.Tensor]) -> list[tuple[Any, ...]]:
    """A weight's patches as ComfyUI has them. RequestError: this ComfyUI has no such adapter or function."""
    return [
        (strength, decode_value(value, factors), of_model, offset and tuple(offset), named and _find(named, FUNCTIONS))
        for strength, value, of_model, offset, named in patches
    ]


def decode_value(value: Tree, factors: Mapping[str, torch.Tensor]) -> Any:
    """A patch's value as ComfyUI has it."""
    tensors = [factors[name].view(getattr(torch, dtype)).reshape(shape) for name, dtype, shape in value["tensors"]]
    content = restore(value["tree"], tensors)
    return _find(value["made"], ADAPTERS)(set(), content) if value["made"] else content


def _find(name: str, inside: str) -> Any:
    module, _, attribute = name.partition(":")
    found = getattr(importlib.import_module(module), attribute, None) if module.startswith(inside) else None
    if not callable(found):
        raise RequestError("The ComfyUI of the workers has no {name}.", "Restart ComfyUI.", name=name)
    return found


def beside(
    layer: str, adapter: Any, strength: float, x: torch.Tensor, forward: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """What ComfyUI's bypass of a linear `forward` gives for x (..., inputs). RequestError: the adapter cannot do it."""
    import comfy.weight_adapter.bypass as bypass

    hook = bypass.BypassForwardHook(nn.Linear(1, 1, bias=False, device="meta"), adapter, multiplier=strength)
    hook.original_forward = forward
    try:
        hook._move_adapter_weights_to_device(x.device, x.dtype)
        result: torch.Tensor = hook._bypass_forward(x)
    except (RuntimeError, NotImplementedError) as error:
        kind = type(adapter).__name__
        what = "ComfyUI's own bypass of {kind} at {layer} fails: {error}"
        raise RequestError(what, "Add it with Load LoRA instead.", kind=kind, layer=layer, error=error) from error
    return result


def add_bypass(layer: nn.Module, name: str, adapter: Any, strength: float, device: torch.device) -> Callable[[], None]:
    """Give a layer of this name ComfyUI's own bypass over its forward; return what takes it away."""
    import comfy.weight_adapter.bypass as bypass

    if isinstance(layer, nn.Linear):  # tried: a fault of ComfyUI's shall not cost the pool
        nothing = torch.zeros(1, 2, layer.out_features, device=device)
        beside(name, adapter, strength, torch.zeros(1, 2, layer.in_features, device=device), lambda x: nothing)
    hook = bypass.BypassForwardHook(layer, adapter, multiplier=strength)
    hook.inject()

    def remove() -> None:
        own = getattr(hook.original_forward, "__func__", None) is type(layer).forward
        hook.eject()
        if own:  # and not as an attribute: the block may be compiled for that already
            layer.__dict__.pop("forward", None)

    return remove


def _seed(key: str) -> int:
    import comfy.model_patcher
    import comfy.utils

    # An older ComfyUI has it in the other module.
    seed = getattr(comfy.utils, "string_to_seed", None) or comfy.model_patcher.string_to_seed
    return int(seed(key))
