"""What ComfyUI's nodes that take a MODEL do to ours: data, one row a node. No ComfyUI needed.

A test enumerates the nodes of the ComfyUI that is present, and fails where one has no row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class How(Enum):
    """Where what a node does is done; the value is said in docs/works-with.md."""

    SAMPLES = "works: it samples"
    OUTSIDE = "works: it acts in ComfyUI's process, between steps or around the network's call"
    GUIDES = "works: its function around guidance runs with the loop, in the ranks"
    SENT = "works: its numbers travel to the ranks"
    REBUILT = "works: the ranks make its functions again from its values"
    WEIGHTS = "works: the ranks patch their weights"
    FILE = "works: ComfyUI's process reads the weights from the file"
    REFUSED = "refused"


@dataclass(frozen=True)
class ModelNode:
    """One node.

    Args:
        why: it is refused, or what else is to be known of it.
    """

    how: How
    why: str = ""


def _each(how: How, *names: str) -> dict[str, ModelNode]:
    return dict.fromkeys(names, ModelNode(how))


def _refused(why: str, *names: str) -> dict[str, ModelNode]:
    return dict.fromkeys(names, ModelNode(How.REFUSED, why))


_DRAWS = "it draws random numbers in there, which workers would not draw as ComfyUI does"
_READS = "it runs the network itself, whose weights are in the workers"
_MERGES = "a merge is made of weights, and ours are in the workers; it works the other way round, as the second model"

MODEL_NODES: Mapping[str, ModelNode] = {
    **_each(
        How.SAMPLES,
        "KSampler", "KSamplerAdvanced", "SamplerCustom", "ParallelSampler", "CFGGuider", "BasicGuider", "DualCFGGuider",
        "LTXVDualCFGGuider", "PerpNegGuider",
    ),
    "DualModelGuider": ModelNode(
        How.SAMPLES,
        "step by step: a loop in the ranks is one model's, with its plan, patches and recordings, and a device without "
        "room for two has the weights of one",
    ),
    **_each(
        How.OUTSIDE,
        "ModelSamplingSD3", "ModelSamplingAuraFlow", "ModelSamplingFlux", "ModelSamplingLTXV", "ModelSamplingDiscrete",
        "ModelSamplingContinuousEDM", "ModelSamplingContinuousV", "ModelSamplingStableCascade", "ModelNoiseScale",
        "BasicScheduler", "BetaSamplingScheduler", "SDTurboScheduler", "SamplingPercentToSigma", "SamplerSASolver",
        "AddNoise", "APG", "Epsilon Scaling", "FreSca", "LatentApplyOperationCFG", "PerpNeg",
        "RenormCFG", "TemporalScoreRescaling", "HiDreamO1PatchSeamSmoothing", "TripoSplatSamplingPreview",
        "GetICLoRAParameters", "ContextWindowsManual", "WanContextWindowsManual", "LTXVContextWindows", "EasyCache",
        "LazyCache", "ARVideoI2V", "SeedVR2Conditioning", "wanBlockSwap", "LTXVDurationPredictor",
    ),
    **_each(
        How.GUIDES,
        "CFGNorm", "CFGOverride", "CFGZeroStar", "Mahiro", "TCFG", "RescaleCFG", "VideoLinearCFGGuidance",
        "VideoTriangleCFGGuidance", "DifferentialDiffusion", "LTXVReferenceAudio", "LTXVSpatioTemporalGuidance",
        "LTXVModalityGuidance",
    ),
    **_each(How.SENT, "ScaleROPE", "ChromaRadianceOptions", "MiniMaxH3SigmaShift"),
    **_each(
        How.REBUILT,
        "SkipLayerGuidanceDiT", "SkipLayerGuidanceDiTSimple", "SkipLayerGuidanceSD3", "PerturbedAttentionGuidance",
        "NAGuidance", "FreeU", "FreeU_V2", "PatchModelAddDownscale", "FluxKVCache", "QwenImageDiffsynthControlnet",
        "ZImageFunControlnet", "USOStyleReference", "AnimaLLLiteApply", "WanInfiniteTalkToVideo", "WanAnimate2Cache",
    ),
    **_each(
        How.WEIGHTS,
        "LoraLoader", "LoraLoaderModelOnly", "LoraLoaderBypass", "LoraLoaderBypassModelOnly", "LoraModelLoader",
        "UNetSelfAttentionMultiply", "UNetCrossAttentionMultiply", "UNetTemporalAttentionMultiply",
    ),
    **_refused(_DRAWS, "HyperTile", "TomePatchModel"),
    **_refused(_READS, "SAM3_Detect", "SAM3_VideoTrack", "SDPoseKeypointExtractor", "RTDETR_detect"),
    **_refused(
        _MERGES,
        "ModelMergeSimple", "ModelMergeAdd", "ModelMergeSubtract", "ModelMergeBlocks", "ModelMergeAuraflow",
        "ModelMergeCosmos14B", "ModelMergeCosmos7B", "ModelMergeCosmosPredict2_14B", "ModelMergeCosmosPredict2_2B",
        "ModelMergeFlux1", "ModelMergeKrea2", "ModelMergeLTXV", "ModelMergeMochiPreview", "ModelMergeQwenImage",
        "ModelMergeSD1", "ModelMergeSD2", "ModelMergeSD35_Large", "ModelMergeSD3_2B", "ModelMergeSDXL",
        "ModelMergeWAN2_1",
    ),
    **_each(How.FILE, "ModelSave", "CheckpointSave", "ImageOnlyCheckpointSave"),
    **_refused("it computes with single weights, which are in the workers", "LoraSave"),
    **_refused("it keeps keys and values in the network from step to step", "SamplerARVideo"),
    **_refused("it asks for gradients, and the network is in the workers", "TrainLoraNode"),
    **_refused("it reads attention maps in there, which stay in the workers", "SelfAttentionGuidance"),
    **_refused("its network is made of torch's own layers by a file that workers do not have", "HypernetworkLoader"),
    **_refused("its network depends on the sigma of each step inside of the network", "SUPIRApply"),
    **_refused("its network depends on the size of each picture along the way", "WanUni3CControlnetApply"),
    **_refused("other than PyTorch's: choose the kernel in Parallel Config", "ModelAttentionBackend"),
    **_refused("other than the default: choose weight_dtype in Parallel Loader", "ModelComputeDtype"),
    **_refused("switch compile on in Parallel Config", "TorchCompileModel"),
    **_refused("Parallel Config has the devices", "MultiGPU_WorkUnits", "SelectModelDevice"),
    **_refused("a ControlNet that is a difference to the model's weights needs them here", "DiffControlNetLoader"),
}  # fmt: skip
"""By the type of the node."""


def refused_nodes() -> dict[str, str]:
    """Type of each node that the pool cannot carry -> why."""
    return {name: node.why for name, node in MODEL_NODES.items() if node.how is How.REFUSED}
