"""Builds an ordinary MODEL around a transformer that is elsewhere: ComfyUI's own class for the checkpoint, made of the
file's header alone (no weight is read), with `_forward` of its transformer replaced by the call to the pool."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import comfy.conds
import comfy.model_management
import comfy.utils
import torch

from parallel_runtime.errors import RequestError, UnsupportedModelError
from parallel_runtime.loading.host_file import HostFile
from parallel_runtime.networks.comfyui.seam import RUN_SIGMAS, reads_sigmas, seam_of, tabulate
from parallel_runtime.networks.tables.blocks import LATENT_SHAPES
from parallel_runtime.networks.tables.comfyui import find_network
from parallel_runtime.requests.conditioning import Shared
from parallel_runtime.requests.requests import INVOKABLE

from .interrupt import stopping_with_prompt
from .real_weights import Source, give_weights, operations_elsewhere, run_here
from .remote_patcher import RemoteModelPatcher
from .remote_transformer import RemoteTransformer
from .transformer_call import read_call
from .transportable import AROUND_LOOP
from .untouched import Untouched
from .weight_patches import PatchedShapes, PatchReader

REFERENCE_METHOD = "ref_latents_method"
FLOAT8 = {
    "fp8_e4m3fn": torch.float8_e4m3fn, "fp8_e4m3fn_fast": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
}  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_BROUGHT = (comfy.conds.CONDRegular, comfy.conds.CONDCrossAttn)  # ComfyUI brings them to the device at each call
_UNANSWERED = "preprocess_prefix"  # of a network (SenseNova U1.5), asked before a run for more than one tensor


def choose_types(file: HostFile, weight_dtype: str) -> tuple[torch.dtype, torch.dtype | None]:
    """Type of plain weights, and that which ComfyUI computes in, if another; RequestError where the pool lacks it."""
    supported = list(file.config.supported_inference_dtypes)
    device = comfy.model_management.get_torch_device()
    numbers = sum(tensor.numel() for tensor in file.state_dict.values())
    weights = (DTYPES | FLOAT8).get(weight_dtype) or comfy.model_management.unet_dtype(
        model_params=numbers, supported_dtypes=supported, weight_dtype=file.stored
    )
    cast = comfy.model_management.unet_manual_cast(None if file.stored is None else weights, device, supported)
    if (compute := cast or weights) not in DTYPES.values():
        what = "ComfyUI would compute this model in {compute}, which the workers do not have."
        raise RequestError(what, "Set weight_dtype to bf16, fp16 or fp32.", compute=compute)
    return weights, cast


def build_model(
    file: HostFile, weights: torch.dtype, cast: torch.dtype | None, remote: RemoteTransformer
) -> RemoteModelPatcher:
    """Make the MODEL, of types as `choose_types` gives. Costs no memory; the weights of `remote` need not be loaded."""
    config = file.config
    config.set_inference_dtype(weights, cast)
    config.custom_operations = operations_elsewhere()
    model = file.build_model()
    model.parallel_remote = remote
    model.parallel_patches = PatchReader()
    # The batch of CFG branches is the pool's to split: ComfyUI shall hand it over whole.
    model.memory_required = lambda *args, **kwargs: 0
    shared: set[str] = set()
    model.extra_conds = keeping(model, shared)
    source = Source(remote, None if getattr(config, "quant_config", None) else weights)
    model.parallel_source = source
    give_weights(model.diffusion_model, source)
    data = find_network(type(model.diffusion_model))
    run_here(model.diffusion_model, data.run_outside if data is not None else (), source)
    model.parallel_untouched = _redirect(model, remote, shared)
    model.parallel_shapes = PatchedShapes(model.parallel_untouched)
    return RemoteModelPatcher(
        model,
        load_device=comfy.model_management.get_torch_device(),
        offload_device=comfy.model_management.unet_offload_device(),
    )


def _invoke(
    remote: RemoteTransformer, method: str, signature: inspect.Signature, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """In place of a method that needs the weights: the pool runs it."""
    arguments = signature.bind(*args, **kwargs).arguments
    first = next(value for value in arguments.values() if isinstance(value, torch.Tensor))
    with stopping_with_prompt() as interrupted:
        return remote.invoke(method, arguments, interrupted).to(first)


def _refuse(name: str, *_: Any, **__: Any) -> None:
    """In place of a method that needs the weights and that the pool does not run."""
    text = "Before a run ComfyUI asks {name} for {method}, which the workers cannot compute."
    raise UnsupportedModelError(text, "Load this model with Load Diffusion Model.", name=name, method=_UNANSWERED)


def keeping(model: Any, shared: set[str]) -> Callable[..., dict[str, Any]]:
    """`extra_conds` of a BaseModel, with conditionings brought to the device once a run: ComfyUI copies them at each
    call into a tensor on the host (`cond_cat`) and on to the GPU, 3 to 4 ms of a step of FLUX.1 on an H200. They keep
    their type, for ControlNets of another, and stay where a wrapper would see them. `shared` gets the names of
    those that all rows share."""
    original = type(model).extra_conds
    called = weakref.ref(model)  # which has this function: it is to go with the last reference to it

    def extra_conds(**arguments: Any) -> dict[str, Any]:
        conds = original(called(), **arguments)
        wrapped = _wrapped(getattr(called(), "current_patcher", None))
        for name, cond in conds.items():
            if isinstance(cond, comfy.conds.CONDConstant):
                shared.add(name)
            if not wrapped and type(cond) in _BROUGHT and isinstance(cond.cond, torch.Tensor):
                conds[name] = type(cond)(cond.cond.to(arguments.get("device")))
        return conds

    return extra_conds


def _wrapped(patcher: Any) -> bool:
    """Whether anything stands between ComfyUI's sampler and the model's own code, or nobody knows."""
    if patcher is None:
        return True
    options = patcher.model_options
    inside = options.get("transformer_options", {}).get("wrappers", {})
    return "model_function_wrapper" in options or any(
        kind not in AROUND_LOOP["wrappers"] and any(named.values())
        for wrappers in (patcher.wrappers, inside)
        for kind, named in wrappers.items()
    )


def reference_method(transformer: Any) -> str | None:
    """Where the network puts reference latents that come without a word of it: a node (FluxKVCache) may change that."""
    return getattr(getattr(transformer, "params", transformer), "default_ref_method", None)


def _redirect(model: Any, remote: RemoteTransformer, shared: set[str]) -> Untouched:
    """Replace the method at the seam of a BaseModel's network. Later changes of it are found before a run or call."""
    transformer = model.diffusion_model
    name = seam_of(transformer)
    signature = inspect.signature(getattr(transformer, name))
    asks_sigmas = reads_sigmas(transformer)
    untouched: Untouched
    usual_method = reference_method(transformer)
    # ComfyUI wants a model to go with the last reference to it, and collects garbage where one does not.
    called: Callable[[], Any] = weakref.ref(model)

    def forward(*args: Any, **kwargs: Any) -> Any:
        untouched.check_quickly()
        call = read_call(signature, args, kwargs, shared)
        method = reference_method(transformer)
        if method != usual_method and "ref_latents" in call.conditioning:
            call = replace(call, conditioning={REFERENCE_METHOD: method, **call.conditioning})
        # The model sampling is asked for at each call: other nodes replace it.
        if asks_sigmas and (table := tabulate(call.options, called().model_sampling.timestep)):
            call = replace(call, conditioning={**call.conditioning, RUN_SIGMAS: Shared(table)})
        with stopping_with_prompt() as interrupted:
            if isinstance(call.x, torch.Tensor):
                return remote.forward(call, interrupted)
            # Video and audio go as one tensor, as ComfyUI's sampler has them.
            packed, shapes = comfy.utils.pack_latents(call.x)
            conditioning = {**call.conditioning, LATENT_SHAPES: [list(shape) for shape in shapes]}
            output = remote.forward(replace(call, x=packed, conditioning=conditioning), interrupted)
            return comfy.utils.unpack_latents(output, shapes)

    setattr(transformer, name, forward)
    for method in INVOKABLE:
        if hasattr(transformer, method):
            taken = inspect.signature(getattr(transformer, method))
            setattr(transformer, method, partial(_invoke, remote, method, taken))
    if hasattr(transformer, _UNANSWERED):
        setattr(transformer, _UNANSWERED, partial(_refuse, type(transformer).__name__))
    # A wrapper around the call may have replaced this very method, which would then not get to look.
    transformer.register_forward_pre_hook(lambda *_: untouched.check_quickly())
    untouched = Untouched(transformer)
    return untouched
