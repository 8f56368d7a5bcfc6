"""ComfyUI's handle on the MODEL. Its weights are on the meta device: nothing here may copy or move them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import comfy.model_management
import torch
from comfy.patcher_extension import CallbacksMP

from parallel_runtime.patching.patch_data import check_patches

from .pool_patchers import OnAnotherGpu, PatcherOfTransformer, PoolShare, give_back, keep, other_gpus
from .real_weights import refuse
from .transportable import check_options, refusal, weight_obstacles
from .weight_patches import is_bypass


class RemoteModelPatcher(PatcherOfTransformer):
    """ModelPatcher whose weights are the pool's, on ComfyUI's own GPU; for others see pool_patchers.py."""

    @property
    def devices(self) -> list[torch.device]:
        """GPUs that the pool may compute on, as this process has them."""
        own = [self.load_device] if self.remote.shares(self.load_device) else []
        return own + other_gpus(self.remote, self.load_device)

    def make_room(self, weights: int) -> None:
        """Have ComfyUI's own models leave the GPUs, each of which is about to get so many bytes of the pool's."""
        for device in self.devices:
            comfy.model_management.free_memory(weights + comfy.model_management.minimum_inference_memory(), device)

    def model_patches_models(self) -> list[Any]:
        """What ComfyUI loads along, to make room on the pool's other GPUs; the same of all clones."""
        if not hasattr(self.model, "parallel_elsewhere"):
            others = other_gpus(self.remote, self.load_device)
            self.model.parallel_elsewhere = [
                OnAnotherGpu(PoolShare(self.remote), load_device=device, offload_device=torch.device("cpu"))
                for device in others
            ]
        return [*super().model_patches_models(), *self.model.parallel_elsewhere]

    def add_patches(self, patches, strength_patch=1.0, strength_model=1.0) -> list[Any]:
        """Called by the node that adds a LoRA. Raises RequestError for a patch that ranks could not compute."""
        check_patches(self._own(patches))
        return super().add_patches(patches, strength_patch, strength_model)

    def clone(self, *args: Any, force_deepcopy: bool = False, **kwargs: Any) -> Any:
        """A handle on the same MODEL. Refused where a node wants weights of its own, to train with them."""
        if force_deepcopy:
            raise refuse("train with them")
        return super().clone(*args, **kwargs)

    def get_key_patches(self, filter_prefix=None) -> dict[str, Any]:
        """Called by nodes that merge models: the weights, read from the file, and what is to be done to them."""
        here = self.model.parallel_source.load()
        here.patches = self.patches
        return here.get_key_patches(filter_prefix)

    def state_dict_for_saving(self, clip_state_dict=None, vae_state_dict=None, clip_vision_state_dict=None):
        """Called by nodes that save the model."""
        here = self.model.parallel_source.load()
        here.patches = {key: list(each) for key, each in self.patches.items()}
        here.patches_uuid = self.patches_uuid
        comfy.model_management.load_models_gpu([here], force_patch_weights=True)
        return here.state_dict_for_saving(clip_state_dict, vae_state_dict, clip_vision_state_dict)

    def patch_weight_to_device(self, key, device_to=None, inplace_update=False, return_weight=False, force_cast=False):
        """Called by nodes that compute with single weights (LoraSave), which are refused."""
        raise refuse("compute with them")

    def add_weight_wrapper(self, name, function) -> None:
        """Called by nodes that train, which are refused."""
        raise refuse("change them while it runs")

    def add_hook_patches(self, hook, patches, strength_patch=1.0, strength_model=1.0) -> list[Any]:
        """Called before a run for each LoRA of a conditioning; as `add_patches`."""
        check_patches(self._own(patches))
        return super().add_hook_patches(hook, patches, strength_patch, strength_model)

    def _own(self, patches: Mapping[Any, Any]) -> dict[Any, Any]:
        """Those of this model: a LoRA brings its text encoders' along, and ComfyUI leaves them out."""
        names = self.model.state_dict().keys()
        return {key: value for key, value in patches.items() if (key if isinstance(key, str) else key[0]) in names}

    def patch_hooks(self, hooks) -> None:
        """Called before each call of the transformer whose conditioning has other hooks than the last one."""
        self.current_hooks = hooks
        if self.model.current_patcher is self:
            self._ask()

    def unpatch_hooks(self, whitelist_keys_set=None) -> None:
        """No weight is here that a hook could have changed."""
        if whitelist_keys_set is None:
            self.current_hooks = None

    def inject_model(self) -> None:
        """Puts nothing there: a bypass LoRA is the ranks' to compute, and `pre_run` refuses modules of other nodes."""

    def _ask(self) -> None:
        self.remote.patches = self.model.parallel_patches.read(self)

    def load(self, device_to=None, lowvram_model_memory=0, force_patch_weights=False, full_load=False) -> None:
        """Move what is not the transformer (model sampling tables); the pool loads at the first call."""
        keep(self)
        self._move_others(device_to)
        # While a prompt is prepared, some models call their network (preprocess_text_embeds), or look at its weights.
        self.model.parallel_shapes.take(self.model, self.patches)
        self._ask()
        for callback in self.get_all_callbacks(CallbacksMP.ON_LOAD):
            callback(self, device_to, lowvram_model_memory, force_patch_weights, full_load)
        self.apply_hooks(self.forced_hooks, force_apply=True)

    def unpatch_model(self, device_to=None, unpatch_weights=True) -> None:
        """Take back object patches. The device is not passed on: ComfyUI would move the whole module there."""
        super().unpatch_model(None, unpatch_weights)
        if unpatch_weights:
            self._move_others(device_to)

    def partially_load(self, device_to, extra_memory=0, force_patch_weights=False):
        """Called before each run, which ranks make room for: little free memory is no reason to unload."""
        return super().partially_load(device_to, max(extra_memory, 0), force_patch_weights)

    def detach(self, unpatch_all=True):
        """Let go of the model; when ComfyUI unloads everything (Free, Unload), also of the weights in the pool."""
        model = super().detach(unpatch_all)
        if unpatch_all:
            give_back(self.remote, park=False)
        return model

    def pre_run(self) -> None:
        """Called before each sampling run; RequestError for changes that do not reach the pool."""
        self.remote.notices.begin()
        others = [name for name, each in self.injections.items() if not is_bypass(each)]
        objects = [
            name
            for name, value in self.object_patches.items()
            # ModelComputeDtype's default changes nothing.
            if name != "manual_cast_dtype" or value not in (None, self.object_patches_backup.get(name))
        ]
        if found := weight_obstacles(self.weight_wrapper_patches, objects, others, self.wrappers):
            raise refusal(found)
        check_options(self.model_options.get("transformer_options", {}))
        self.model.parallel_shapes.take(self.model, self.patches)
        self.model.parallel_untouched.check()
        self._ask()
        self.remote.functions.begin()
        super().pre_run()

    def cleanup(self) -> None:
        super().cleanup()
        # ComfyUI calls this in a `finally`: where an error or a cancel ends the run, it is on its way now.
        self.remote.finish_run(whole=sys.exc_info()[0] is None)

    def _move_others(self, device: torch.device | None) -> None:
        if device is None:
            return
        for name, module in self.model.named_children():
            if name != "diffusion_model":
                module.to(device)
        for parameter in self.model.parameters(recurse=False):
            parameter.data = parameter.data.to(device)
