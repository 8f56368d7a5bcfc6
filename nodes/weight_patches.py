"""The weight patches of a MODEL, as its ranks get them, and the shapes that they give to weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import comfy.lora
import torch

from parallel_runtime.patching.patch_data import NO_PATCHES, Encoder, PatchSet, WeightPatches

from .comfyui_code import comfyui_code
from .untouched import Untouched

_BYPASS = "BypassInjectionManager.create_injections.<locals>."  # injections of ComfyUI's bypass LoRA
_MOST_SETS = 64  # of the hooks of a run: a keyframe's strength is one more


class PatchReader:
    """Reads the patches of the clones of one MODEL. Sets that were read are kept, as the next run wants the same."""

    def __init__(self) -> None:
        self._encoder = Encoder()
        self._last: dict[str, tuple[Any, PatchSet]] = {}

    def read(self, patcher: Any) -> WeightPatches:
        """What a RemoteModelPatcher asks of the weights now; RequestError for a patch that ranks cannot compute."""
        bypass = bypass_of(patcher.injections)
        stamp = patcher.patches_uuid, [(name, id(adapter), strength) for name, (adapter, strength) in bypass.items()]
        patches = self._kept("patches", stamp, lambda: self._encoder.encode(patcher.patches, bypass))
        hooks = NO_PATCHES
        if patcher.current_hooks is not None:
            strengths = [(hook.hook_ref, hook.strength) for hook in patcher.current_hooks.hooks]
            hooks = self._kept(
                f"hooks {len(strengths)} {hash(tuple(strengths))}",
                (patcher.patches_uuid, strengths),
                lambda: self._encoder.encode(patcher.get_combined_hook_patches(patcher.current_hooks)),
            )
        code = comfyui_code(None) if patches.name or hooks.name else None
        return WeightPatches(patches, hooks, code)

    def _kept(self, what: str, stamp: Any, make: Callable[[], PatchSet]) -> PatchSet:
        known = self._last.get(what)
        if known is None or known[0] != stamp:
            if what == "patches" or len(self._last) > _MOST_SETS:
                self._last.clear()  # another clone: its hooks are others
            known = self._last[what] = (stamp, make())
        return known[1]


def bypass_of(injections: Mapping[str, Sequence[Any]]) -> dict[str, tuple[Any, float]]:
    """The layers that ComfyUI's bypass LoRA is to act beside: ComfyUI's name -> adapter and strength."""
    found: dict[str, tuple[Any, float]] = {}
    for each in filter(is_bypass, injections.values()):
        for manager in _managers(each):
            hooked = {id(hook.adapter) for hook in manager.hooks}
            found |= {key: value for key, value in manager.adapters.items() if id(value[0]) in hooked}
    return found


def is_bypass(injections: Sequence[Any]) -> bool:
    """Whether all of these are ComfyUI's bypass LoRA, of adapters that are not being trained."""
    return len(list(_managers(injections))) == len(injections) > 0


def _managers(injections: Sequence[Any]) -> Iterator[Any]:
    for injection in injections:
        function = injection.inject
        if getattr(function, "__qualname__", "").startswith(_BYPASS) and "comfy." in function.__module__:
            yield next(cell.cell_contents for cell in function.__closure__ if hasattr(cell.cell_contents, "adapters"))


class PatchedShapes:
    """The weights of a model on the meta device, some of them in another shape: FLUX's Canny and Depth LoRA widen the
    first layer, from which ComfyUI reads how many channels it is to concatenate to the latent. `untouched` is told. Has
    no reference to the model, which is to go with the last one."""

    def __init__(self, untouched: Untouched):
        self._untouched = untouched
        self._originals: dict[str, torch.nn.Parameter] = {}

    def take(self, model: torch.nn.Module, patches: Mapping[str, Sequence[Any]]) -> None:
        """Have the model in the shapes that these patches give, and in the network's own otherwise."""
        while self._originals:
            self._put(model, *self._originals.popitem())
        shape_of = getattr(comfy.lora, "calculate_shape", None)  # an older ComfyUI does not know it
        if shape_of is None:
            return
        for key, given in patches.items():
            layer, _, name = key.rpartition(".")
            weight = getattr(model.get_submodule(layer), name)
            shape = tuple(shape_of(given, weight, key))
            if isinstance(weight, torch.nn.Parameter) and shape != tuple(weight.shape):
                self._originals[key] = weight
                wider = torch.empty(shape, dtype=weight.dtype, device="meta")
                self._put(model, key, torch.nn.Parameter(wider, requires_grad=False))

    def _put(self, model: torch.nn.Module, key: str, weight: torch.nn.Parameter) -> None:
        layer, _, name = key.rpartition(".")
        setattr(model.get_submodule(layer), name, weight)
        self._untouched.expect(layer, name, weight)
