"""A patched weight, computed by ComfyUI's own functions in its order and its types. ComfyUI must be importable."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .patch_data import PREFIX, PatchSet, decode_patches, decode_value


class Computing:
    """Computes patched weights on a device.

    Args:
        patches: the sets that apply one after the other: the MODEL's, and those of a conditioning's hooks.
    """

    def __init__(self, device: torch.device, patches: PatchSet, hooks: PatchSet):
        self._device = device
        self._patches = patches
        self._hooks = hooks

    def weight(self, name: str, base: torch.Tensor, owner: nn.Module | None) -> torch.Tensor:
        """One weight with all its patches.

        Args:
            name: ComfyUI's, without prefix.
            base: as the file has it; it is not written to.
            owner: the layer that has it, which may have rules of its own for quantised weights.
        """
        import comfy.model_management

        weight = base
        # As ModelPatcher.patch_weight_to_device and ModelPatcher.patch_hook_weight_to_device do.
        types = (comfy.model_management.lora_compute_dtype(self._device), torch.float32)
        for given, dtype in zip((self._patches, self._hooks), types, strict=True):
            if name in given.weights:
                weight = self._apply(name, weight, base, owner, given, dtype)
        return weight

    def _apply(
        self,
        name: str,
        weight: torch.Tensor,
        base: torch.Tensor,
        owner: nn.Module | None,
        given: PatchSet,
        dtype: torch.dtype,
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
        value = comfy.lora.calculate_weight(patches, value, key, original_weights=original)
        if put is None:
            return comfy.float.stochastic_rounding(value, weight.dtype, seed=_seed(key))
        return put(value, inplace_update=False, seed=_seed(key), return_weight=True)

    def folded(self, name: str, weight: torch.Tensor, layer: str, inputs: int) -> torch.Tensor:
        """The weight or bias of a layer with which it gives what ComfyUI's bypass gives beside an unchanged one.

        An adapter's bypass is affine in what the layer gets, so it is computed once, on the unit vectors.

        Args:
            weight: the layer's own, with its patches.
            inputs: of the layer.
        """
        import comfy.float
        import comfy.weight_adapter.bypass as bypass

        value, strength = self._patches.bypass[layer]
        adapter = decode_value(value, self._patches.factors)
        own = weight.to(self._device, torch.float32)
        module: Any = nn.Linear(1, 1, bias=False, device="meta")
        if own.ndim > 2:
            kind: Any = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}[own.ndim]
            module = kind(own.shape[1], own.shape[0], own.shape[2:], bias=False, device="meta")
        hook = bypass.BypassForwardHook(module, adapter, multiplier=strength)
        hook._move_adapter_weights_to_device(self._device, torch.float32)
        if own.ndim > 2:
            result = self._folded_kernel(own, adapter, strength)
        elif own.ndim == 2:
            hook.original_forward = lambda x: F.linear(x, own)
            result = hook._bypass_forward(torch.eye(inputs, device=self._device)).T
        else:
            hook.original_forward = lambda x: own.expand(x.shape[0], -1)
            result = hook._bypass_forward(torch.zeros(1, inputs, device=self._device))[0]
        return comfy.float.stochastic_rounding(result.contiguous(), weight.dtype, seed=_seed(PREFIX + name))

    def _folded_kernel(self, own: torch.Tensor, adapter: Any, strength: float) -> torch.Tensor:
        import comfy.lora

        patch = (strength, adapter, 1.0, None, None)
        return comfy.lora.calculate_weight([patch], own.clone(), "")


def _seed(key: str) -> int:
    import comfy.model_patcher
    import comfy.utils

    # An older ComfyUI has it in the other module.
    seed = getattr(comfy.utils, "string_to_seed", None) or comfy.model_patcher.string_to_seed
    return int(seed(key))
