"""ComfyUI's nodes that give, take or change a MODEL, as data: what each does to it, and so whether the pool can follow.

Read from ComfyUI 0.33's source, those of newer.py from 0.38's. A test holds each effect against
nodes/transportable.py, which refuses it or not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Effect(Enum):
    """What a node does to a MODEL; the value is what is said of it where the pool cannot follow."""

    OUTSIDE = ""
    """Nothing, or it acts between the steps or around the network's call: model sampling, CFG functions, wrappers; or
    it patches weights, which ranks do by ComfyUI's code: LoRA."""
    OPTION = "an object among the transformer options"
    WEIGHTS = "weights of the network, which are in the pool"
    ATTENTION = "another attention function"


@dataclass(frozen=True)
class NodeType:
    """A type of node.

    Args:
        detail: what of `effect` it is, for the reason.
        samples: it runs the network for an image, video, sound or shape: what a template's MODEL is for.
        idle: by the node's widgets: whether it does nothing.
    """

    effect: Effect = Effect.OUTSIDE
    detail: str = ""
    samples: bool = False
    idle: Callable[[Mapping[str, Any]], bool] = lambda widgets: False

    @property
    def reason(self) -> str:
        """Why the pool cannot follow; "" where it can."""
        return f"{self.effect.value} ({self.detail})" if self.detail and self.effect.value else self.effect.value


_OUTSIDE = NodeType()
_PYTORCHS = "pytorch attention"
_SAMPLES = NodeType(samples=True)
_READS = NodeType(Effect.WEIGHTS, "it runs the network itself")

NODE_TYPES: Mapping[str, NodeType] = {
    **dict.fromkeys(
        (
            "KSampler", "KSamplerAdvanced", "SamplerCustom", "CFGGuider", "BasicGuider", "DualCFGGuider",
            "DualModelGuider", "LTXVDualCFGGuider",
        ),
        _SAMPLES,
    ),
    **dict.fromkeys(
        # Model sampling, which is an object patch beside the network; schedules; what is attached to the MODEL.
        (
            "ModelSamplingSD3", "ModelSamplingAuraFlow", "ModelSamplingFlux", "ModelSamplingLTXV",
            "ModelSamplingDiscrete", "ModelSamplingContinuousEDM", "ModelSamplingContinuousV", "ModelNoiseScale",
            "MiniMaxH3SigmaShift",
            "BasicScheduler", "BetaSamplingScheduler", "SDTurboScheduler", "GetICLoRAParameters", "ComfySwitchNode",
            # Functions of the sampler, on the network's predictions.
            "CFGNorm", "CFGZeroStar", "RescaleCFG", "LatentApplyOperationCFG", "VideoLinearCFGGuidance",
            "DifferentialDiffusion", "LTXVReferenceAudio", "TemporalScoreRescaling",
            # It takes its prompts out of the network: they are in ComfyUI's process, too.
            "SeedVR2Conditioning",
            # Wrappers around the loop, a prediction or the network's call.
            "CFGOverride", "HiDreamO1PatchSeamSmoothing", "TripoSplatSamplingPreview",
            # Numbers among the transformer options, which travel.
            "ChromaRadianceOptions", "ScaleROPE", "ContextWindowsManual", "EasyCache", "QwenImage21Cache",
            # Functions that the ranks make again (networks/comfyui/node_rules.py).
            "AnimaLLLiteApply", "QwenImageDiffsynthControlnet", "ZImageFunControlnet", "USOStyleReference",
            "WanInfiniteTalkToVideo", "FluxKVCache", "SkipLayerGuidanceDiT", "SkipLayerGuidanceDiTSimple",
            "WanAnimate2Cache",
            # Weight patches.
            "LoraLoaderModelOnly", "LoraLoader", "LoraLoaderBypass", "LoraLoaderBypassModelOnly",
            "UNetTemporalAttentionMultiply",
        ),
        _OUTSIDE,
    ),
    "ARVideoI2V": _OUTSIDE,
    "ModelAttentionBackend": NodeType(
        Effect.ATTENTION, "comfy kitchen's, in int8", idle=lambda widgets: widgets.get("attention") == _PYTORCHS
    ),
    "BlockSparseAttention": NodeType(Effect.ATTENTION, "block-sparse"),
    "MiniMaxH3FunControlNetApply": NodeType(Effect.WEIGHTS, "a ControlNet inside of its blocks"),
    **dict.fromkeys(("SAM3_Detect", "SAM3_VideoTrack", "SDPoseKeypointExtractor", "RTDETR_detect"), _READS),
}  # fmt: skip
"""Nodes that take a MODEL, and give one or not. One that is not here is not known."""


@dataclass(frozen=True)
class LoaderType:
    """A node that makes a MODEL of a file.

    Args:
        file: widget with the file's name.
        reason: why no loader of ours takes its place; "" where one does.
    """

    file: str
    reason: str = ""


LOADERS: Mapping[str, LoaderType] = {
    "UNETLoader": LoaderType("unet_name"),
    "CheckpointLoaderSimple": LoaderType("ckpt_name"),
    "ImageOnlyCheckpointLoader": LoaderType("ckpt_name"),
    "ParallelLoader": LoaderType("model_name"),
    "ParallelCheckpointLoader": LoaderType("ckpt_name"),
    "UnetLoaderGGUF": LoaderType("unet_name"),
}

SAMPLERS: Mapping[str, NodeType] = {
    **dict.fromkeys(
        (
            "KSamplerSelect", "SamplerEulerAncestral", "SamplerEulerAncestralCFGPP", "SamplerLCM", "SamplerLMS",
            "SamplerDPMPP_2M_SDE", "SamplerDPMPP_3M_SDE", "SamplerDPMPP_SDE", "SamplerER_SDE", "SamplerSASolver",
            "VOIDSampler",
        ),
        _OUTSIDE,
    ),
    "SamplerARVideo": NodeType(Effect.OPTION, "ar_state: keys and values that it keeps in the network"),
}  # fmt: skip
"""Nodes that give a SAMPLER: their loops call the network as any other does, or set something in it."""

CONDITIONINGS = frozenset(
    (
        "BerniniConditioning", "CLIPTextEncode", "CLIPTextEncodeFlux", "CLIPTextEncodeSDXL", "ConditioningLoader",
        "CLIPTextEncodeSDXLRefiner", "ConditioningCombine", "ConditioningConcat", "ConditioningZeroOut",
        "ControlNetApply", "ControlNetApplyAdvanced", "ControlNetApplySD3", "ControlNetInpaintingAliMamaApply",
        "FluxGuidance", "FluxKontextMultiReferenceLatentMethod", "HiDreamO1ReferenceImages", "Hunyuan3Dv2Conditioning",
        "Hunyuan3Dv2ConditioningMultiView", "HunyuanVideo15ImageToVideo", "HunyuanVideo15SuperResolution",
        "InpaintModelConditioning", "InstructPixToPixConditioning", "Kandinsky5ImageToVideo", "LTXVAddGuide",
        "LTXVConditioning", "LTXVCropGuides", "LTXVImgToVideo", "LTXVReferenceAudio", "LotusConditioning",
        "MiniMaxH3AddGuide", "MiniMaxH3ImageToVideo", "MiniMaxH3ReferenceToVideo", "MiniMaxMusic3TextEncode",
        "PiDConditioning", "Pixal3DConditioning",
        "ReferenceLatent", "SVD_img2vid_Conditioning", "StyleModelApply", "TextEncodeAceStepAudio",
        "TextEncodeAceStepAudio1.5", "TextEncodeBooguEdit", "TextEncodeJoyImageEdit", "TextEncodeMageFlowEdit",
        "TextEncodeQwenImage21", "TextEncodeQwenImageEdit", "TextEncodeQwenImageEditPlus", "Trellis2Conditioning",
        "Trellis2ShapeStage", "Trellis2TextureStage", "Trellis2UpsampleStage", "TripoSplatConditioning",
        "VOIDInpaintConditioning",
        "Wan22FunControlToVideo", "WanAnimate2ToVideo", "WanAnimateToVideo", "WanCameraImageToVideo", "WanDancerVideo",
        "WanFirstLastFrameToVideo", "WanFunControlToVideo", "WanFunInpaintToVideo", "WanHuMoImageToVideo",
        "WanImageToVideo", "WanMoveTrackToVideo", "WanPhantomSubjectToVideo", "WanSCAILToVideo", "WanSoundImageToVideo",
        "WanSoundImageToVideoExtend", "WanTrackToVideo", "WanVaceToVideo", "unCLIPConditioning",
    )
)  # fmt: skip
"""Nodes that give a CONDITIONING of tensors and numbers, which travel, or add control residuals, which do, too. Hooks
and GLIGEN, which change weights and blocks, are not among them."""

OUTPUTS = re.compile(
    r"(Save|Preview)\w+|ImageCompare|MaskPreview|ImageCompositor|CreateBoundingBoxes|(Meshy|Tencent|Tripo)\w+ModelNode"
)
"""Types of nodes that a server runs for themselves; all others run for one of these, or not at all."""
