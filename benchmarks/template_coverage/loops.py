"""Why a template's loops would go step by step: what its graph brings, asked of the code that decides at run time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nodes.carried_guidance import guider_obstacle
from nodes.transportable import condition_obstacles, loop_obstacles

from .judgement import Prompt, Run
from .node_types import NODE_TYPES
from .prompt_graph import Path

_SAMPLING = {"KSampler", "KSamplerAdvanced", "ParallelSampler", "SamplerCustom", "SamplerCustomAdvanced"}
_EXTRAS = "comfy_extras.nodes_"
_GUIDERS = {
    "BasicGuider": f"{_EXTRAS}custom_sampler:Guider_Basic",
    "CFGGuider": "comfy.samplers:CFGGuider",
    "DualCFGGuider": f"{_EXTRAS}custom_sampler:Guider_DualCFG",
    "DualModelGuider": f"{_EXTRAS}custom_sampler:Guider_DualModel",
    "LTXVDualCFGGuider": f"{_EXTRAS}lt:Guider_LTXAVDualCFG",
    "PerpNegGuider": f"{_EXTRAS}perpneg:Guider_PerpNeg",
}
"""Class of the GUIDER that a node gives."""
_OWN_SAMPLERS = {"VOIDSampler": "the sampler VOIDSampler", "SamplerARVideo": "the sampler SamplerARVideo"}
"""Nodes that give a SAMPLER which is not of ComfyUI's list."""


def _function(code: str) -> Callable[[], None]:
    """A function that is called as a node's: all that is asked of it is its name."""

    def stand_in() -> None:
        pass

    stand_in.__module__, _, stand_in.__qualname__ = code.partition(":")
    return stand_in


def _after(code: str) -> dict[str, Any]:
    return {"sampler_post_cfg_function": [_function(_EXTRAS + code)]}


def _wrapper(kind: str, name: str, code: str = "x:wrapper") -> dict[str, Any]:
    return {"transformer_options": {"wrappers": {kind: {name: [_function(_EXTRAS + code)]}}}}


_MODEL_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "CFGNorm": _after("cfg:CFGNorm.execute.<locals>.cfg_norm"),
    "CFGZeroStar": _after("cfg:CFGZeroStar.execute.<locals>.cfg_zero_star"),
    "RescaleCFG": {
        "sampler_cfg_function": _function(f"{_EXTRAS}model_advanced:RescaleCFG.patch.<locals>.rescale_cfg")
    },
    "VideoLinearCFGGuidance": {
        "sampler_cfg_function": _function(f"{_EXTRAS}video_model:VideoLinearCFGGuidance.patch.<locals>.linear_cfg")
    },
    "LatentApplyOperationCFG": {
        "sampler_pre_cfg_function": [
            _function(f"{_EXTRAS}latent:LatentApplyOperationCFG.execute.<locals>.pre_cfg_function")
        ]
    },
    "TemporalScoreRescaling": _after("eps:TemporalScoreRescaling.execute.<locals>.temporal_score_rescaling"),
    "LTXVReferenceAudio": _after("lt:LTXVReferenceAudio.execute.<locals>.post_cfg_function"),
    "SkipLayerGuidanceDiT": _after("slg:SkipLayerGuidanceDiT.execute.<locals>.post_cfg_function"),
    "SkipLayerGuidanceDiTSimple": {
        "sampler_calc_cond_batch_function": _function(
            f"{_EXTRAS}slg:SkipLayerGuidanceDiTSimple.execute.<locals>.calc_cond_batch_function"
        )
    },
    "DifferentialDiffusion": {
        "denoise_mask_function": _function(
            f"{_EXTRAS}differential_diffusion:DifferentialDiffusion.execute.<locals>.<lambda>"
        )
    },
    "CFGOverride": _wrapper(
        "predict_noise", "CFGOverride", "custom_sampler:CFGOverride.execute.<locals>.predict_noise_wrapper"
    ),
    "HiDreamO1PatchSeamSmoothing": _wrapper("diffusion_model", "hidream_o1_patch_seam_smoothing"),
    "TripoSplatSamplingPreview": _wrapper("outer_sample", "triposplat_sampling_preview"),
    "EasyCache": _wrapper("predict_noise", "easycache"),
    "ContextWindowsManual": {"context_handler": _function("comfy.context_windows:IndexListContextHandler")},
}  # fmt: skip
"""What nodes put into `model_options`; of others, nothing by which a loop goes step by step."""
_ENTRIES: Mapping[str, Mapping[str, Any]] = {
    "ControlNetApply": {"control": True},
    "ControlNetApplyAdvanced": {"control": True},
    "ControlNetApplySD3": {"control": True},
    "ControlNetInpaintingAliMamaApply": {"control": True},
}
"""What nodes put into a conditioning that is more than a text."""
_MASKS = {
    "SetLatentNoiseMask", "InpaintModelConditioning", "VAEEncodeForInpaint", "LTXVImgToVideo", "LTXVAddGuide",
    "LTXVImgToVideoInplace", "Wan22ImageToVideoLatent", "CosmosImageToVideoLatent", "CosmosPredict2ImageToVideoLatent",
    "LTXVSetAudioVideoMaskByTime", "LTXVImgToVideoAdvanced",
}  # fmt: skip
"""Nodes that give a latent a noise mask."""
_OWN_MASK_RULE = (("cosmos", "Cosmos"), ("minimax_h3", "MiniMaxH3"))
"""Files whose models treat what a mask keeps in a way of their own, by a part of the name."""


def step_reasons(prompt: Prompt) -> tuple[str, ...]:
    """Why loops of a prompt's sampled models would go step by step; () where all run in the pool."""
    run = Run(prompt)
    sampled = run.sampled_loaders()
    samplers = [path for path in sorted(run.live) if prompt[path].kind in _SAMPLING and run.samples_with(path, sampled)]
    return tuple(dict.fromkeys(text for path in samplers for text in _reasons(run, path, sampled)))


def _reasons(run: Run, sampler: Path, loaders: set[Path]) -> Iterator[str]:
    """Of one sampler."""
    around = run.reached([sampler], lambda node, name: run.carries(node, name, "MODEL", "GUIDER", "SAMPLER"))
    said = run.reached([sampler], lambda node, name: run.carries(node, name, "GUIDER", "CONDITIONING"))
    latents = run.reached([sampler], lambda node, name: run.carries(node, name, "LATENT"))
    for path in sorted(around):
        node = run.prompt[path]
        if "GUIDER" in node.outputs and (reason := guider_obstacle(_GUIDERS.get(node.kind, node.kind))):
            yield str(reason)
        if node.kind in _OWN_SAMPLERS:
            yield _OWN_SAMPLERS[node.kind]
        if node.kind in _MODEL_OPTIONS and not NODE_TYPES[node.kind].idle(node.widgets):
            yield from map(str, loop_obstacles(_MODEL_OPTIONS[node.kind]))
    entries = [_ENTRIES[kind] for kind in sorted({run.prompt[path].kind for path in said}) if kind in _ENTRIES]
    for each in entries:
        yield from map(str, condition_obstacles({"positive": [each]}))
    if any(run.prompt[path].kind == "ConditioningCombine" for path in said):
        yield from map(str, condition_obstacles({"positive": [{}, {}]}))
    masked = any(run.prompt[path].kind in _MASKS for path in latents)
    files = [run.file(path).lower() for path in sorted(around & loaders)]
    for file in files:
        yield from _family_reasons(file, masked)


def _family_reasons(file: str, masked: bool) -> Iterator[str]:
    for part, name in _OWN_MASK_RULE:
        if masked and part in file:
            yield f"the noise mask of {name}"
