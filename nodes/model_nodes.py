"""ComfyUI's nodes that take a MODEL and that the pool cannot carry, and why: data, one row a node. No ComfyUI needed.

The others are in benchmarks/works_with.py; a test enumerates the nodes of the ComfyUI that is present, and fails where
one has no row.
"""

from __future__ import annotations

from collections.abc import Mapping


def _refused(why: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, why)


_DRAWS = "it draws random numbers in there, which workers would not draw as ComfyUI does"
_READS = "it runs the network itself, whose weights are in the workers"
_MERGES = "a merge is made of weights, and ours are in the workers; it works the other way round, as the second model"

REFUSED: Mapping[str, str] = {
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
