"""What the pack relies on in ComfyUI's code, as data (docs/comfyui-contracts.md, made by `python -m
docs.list_contracts`); and which of it the ComfyUI that is here does not keep: asked once, at start."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .said import Said, said

OLDEST_RUN, NEWEST_RUN, NEWEST_READ = "0.8.0", "0.33.0", "0.38.1"
"""Versions of ComfyUI: run with the host tests, and of which code was read."""


@dataclass(frozen=True)
class Contract:
    """A function or class of ComfyUI's."""

    place: str  # "module:name"
    arguments: tuple[str, ...] = ()  # those that the pack gives, or that its override of a method takes
    overridden: bool = False  # the pack has a method in its place, which ComfyUI calls; else the pack calls it
    newer: bool = False  # ComfyUI 0.8.0 has not it, and the pack does without where it is missing


def _used(place: str, newer: Iterable[str] = (), overridden: bool = False, **functions: str) -> Iterator[Contract]:
    """Functions at a place; name, with two underscores for a dot -> arguments."""
    for written, arguments in functions.items():
        name = written.replace("__dot__", ".")
        yield Contract(place + name, tuple(arguments.split()), overridden, name in newer)


CONTRACTS: tuple[Contract, ...] = (
    *_used(
        "comfy.model_patcher:ModelPatcher.", {"get_free_memory", "state_dict_for_saving", "deepclone_multigpu"}, True,
        model_size="", loaded_size="", get_free_memory="device", current_loaded_device="",
        add_patches="patches strength_patch strength_model", clone="disable_dynamic model_override force_deepcopy",
        get_key_patches="filter_prefix",
        state_dict_for_saving="clip_state_dict vae_state_dict clip_vision_state_dict",
        patch_weight_to_device="key device_to inplace_update return_weight force_cast",
        add_weight_wrapper="name function", add_hook_patches="hook patches strength_patch strength_model",
        patch_hooks="hooks", unpatch_hooks="whitelist_keys_set", inject_model="", eject_model="",
        load="device_to lowvram_model_memory force_patch_weights full_load",
        unpatch_model="device_to unpatch_weights", partially_load="device_to extra_memory force_patch_weights",
        partially_unload="device_to memory_to_free force_patch_weights", detach="unpatch_all", pre_run="", cleanup="",
        model_patches_models="", deepclone_multigpu="new_load_device models_cache",
    ),
    *_used(
        "comfy.model_patcher:",
        ModelPatcher="model load_device offload_device", ModelPatcher__dot__get_all_callbacks="call_type",
        ModelPatcher__dot__apply_hooks="hooks force_apply",
        ModelPatcher__dot__add_wrapper_with_key="wrapper_type key wrapper",
    ),
    *_used("comfy.patcher_extension:", WrapperExecutor="original class_obj wrappers idx"),
    *_used(
        "comfy.samplers:",
        KSampler="", sampler_object="name",
        KSAMPLER__dot__sample="model_wrap sigmas extra_args callback noise latent_image denoise_mask disable_pbar",
        CFGGuider__dot__predict_noise="x timestep model_options seed",
        calc_cond_batch="model conds x_in timestep model_options",
        cfg_function="model cond_pred uncond_pred cond_scale x timestep model_options cond uncond",
        sampling_function="model x timestep uncond cond cond_scale model_options seed",
    ),
    *_used(
        "comfy.sd:",
        load_checkpoint_guess_config="ckpt_path output_vae output_clip output_clipvision embedding_directory "
        "output_model",
        load_diffusion_model="unet_path model_options", load_diffusion_model_state_dict="sd model_options metadata",
        VAE="sd device metadata", VAE__dot__decode="samples_in", VAE__dot__encode="pixel_samples",
    ),
    *_used(
        "comfy.model_detection:", unet_prefix_from_state_dict="state_dict",
        model_config_from_unet="state_dict unet_key_prefix metadata",
        convert_diffusers_mmdit="state_dict output_prefix",
    ),
    *_used(
        "comfy.supported_models_base:", BASE__dot__set_inference_dtype="dtype manual_cast_dtype",
        BASE__dot__get_model="state_dict prefix device", BASE__dot__process_unet_state_dict="state_dict",
    ),
    *_used(
        "comfy.model_base:", BaseModel="model_config", BaseModel__dot__extra_conds="kwargs",
        BaseModel__dot__scale_latent_inpaint="sigma noise latent_image",
        BaseModel__dot__apply_model="x t c_concat c_crossattn control transformer_options",
    ),
    *_used(
        "comfy.model_management:", newer={"get_all_torch_devices"}, get_all_torch_devices="",
        free_memory="memory_required device", minimum_inference_memory="", get_torch_device="",
        load_models_gpu="models force_patch_weights", unet_offload_device="",
        unet_dtype="device model_params supported_dtypes weight_dtype",
        unet_manual_cast="weight_dtype inference_device supported_dtypes",
        throw_exception_if_processing_interrupted="", cast_to_device="tensor device dtype copy",
        lora_compute_dtype="device", InterruptProcessingException="", vae_dtype="device allowed_dtypes",
    ),
    *_used(
        "comfy.utils:", newer={"string_to_seed"}, state_dict_prefix_replace="state_dict replace_prefix filter_keys",
        weight_dtype="sd", convert_old_quants="state_dict model_prefix metadata", pack_latents="latents",
        unpack_latents="combined_latent latent_shapes", string_to_seed="data",
        load_torch_file="ckpt return_metadata",
    ),
    *_used(
        "comfy.lora:", newer={"calculate_shape"},
        calculate_weight="patches weight key intermediate_dtype original_weights",
        calculate_shape="patches weight key original_weights",
    ),
    *_used("comfy.float:", stochastic_rounding="value dtype seed"),
    *_used(
        "comfy.conds:", CONDRegular="cond", CONDRegular__dot__concat="others", CONDCrossAttn__dot__concat="others",
        CONDNoiseShape="cond", CONDConstant="cond",
    ),
    *_used("comfy.model_sampling:", EPS="", CONST="", V_PREDICTION=""),
    *_used(
        "comfy.ops:", {"linear_input_act"}, True,
        linear_input_act="linear x input_act act_weight act_eps residual residual_scale",
    ),
    *_used(
        "comfy.quant_ops:",
        {"TensorWiseINT8Layout.quantize", "TensorWiseINT8Layout.get_plain_tensors", "ck.int8_linear"},
        QuantizedTensor="",
        TensorWiseINT8Layout__dot__quantize="tensor is_weight per_channel convrot convrot_groupsize",
        TensorWiseINT8Layout__dot__get_plain_tensors="qtensor",
        ck__dot__int8_linear="x weight weight_scale bias out_dtype",
    ),
    *_used(
        "comfy.ldm.modules.attention:",
        attention_pytorch="q k v heads mask attn_precision skip_reshape skip_output_reshape",
    ),
)  # fmt: skip


def broken_contracts(contracts: Iterable[Contract] = CONTRACTS) -> list[Said]:
    """A sentence for each that the ComfyUI of this process does not keep; [] where all is well."""
    template = "This ComfyUI changed {place}, which the pack uses: {how}. Update the pack."
    changes = ((each.place.replace(":", "."), _change(each)) for each in contracts)
    return [said(template, place=place, how=how) for place, how in changes if how is not None]


@functools.cache
def host_notes() -> tuple[Said, ...]:
    """What there is to say of the ComfyUI of this process, a sentence each."""
    newer = newer_than_known(importlib.import_module("comfyui_version").__version__)
    return (*broken_contracts(), *([newer] if newer is not None else []))


def newer_than_known(version: str) -> Said | None:
    """A sentence where a ComfyUI is newer than any that was run or read."""
    if _numbers(version) <= _numbers(NEWEST_READ):
        return None
    template = (
        "ComfyUI {version} is newer than any that this version of the pack was run with ({run}) or read for ({read}). "
        "Classes of networks that changed share out CFG branches and pictures alone."
    )
    return said(template, version=version, run=NEWEST_RUN, read=NEWEST_READ)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def _change(contract: Contract) -> Said | None:
    module, _, names = contract.place.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in names.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return None if contract.newer else said("it is gone")
    try:
        parameters = inspect.signature(found).parameters
    except (TypeError, ValueError):  # a class that says nothing of its arguments
        return None
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = {name: each for name, each in parameters.items() if name != "self" and each.kind not in open_ended}
    given = set(contract.arguments)
    if contract.overridden:
        more = [name for name in named if name not in given]
        return said("it takes {names} as well", names=", ".join(more)) if more else None
    asked = [name for name, each in named.items() if each.default is each.empty and name not in given]
    if asked and contract.arguments:
        return said("it asks for {names}", names=", ".join(asked))
    left = sorted(given - parameters.keys())
    if not left or any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return None
    return said("it takes no {names}", names=", ".join(left))
