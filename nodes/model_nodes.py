"""ComfyUI's nodes that take a MODEL and that the pool cannot carry, and why, one row a node. No ComfyUI needed.
The others are in benchmarks/works_with.py; a test fails where a node of the present ComfyUI has no row."""

from __future__ import annotations

from collections.abc import Mapping

_NODES: Mapping[str, tuple[str, ...]] = {
    "it draws random numbers in there, which workers would not draw as ComfyUI does": ("HyperTile", "TomePatchModel"),
    "it runs the network itself, whose weights are in the workers": (
        "SAM3_Detect", "SAM3_VideoTrack", "SDPoseKeypointExtractor", "RTDETR_detect",
    ),
    "a merge is made of weights, and ours are in the workers; it works the other way round, as the second model": (
        "ModelMergeSimple", "ModelMergeAdd", "ModelMergeSubtract", "ModelMergeBlocks", "ModelMergeAuraflow",
        "ModelMergeCosmos14B", "ModelMergeCosmos7B", "ModelMergeCosmosPredict2_14B", "ModelMergeCosmosPredict2_2B",
        "ModelMergeFlux1", "ModelMergeKrea2", "ModelMergeLTXV", "ModelMergeMochiPreview", "ModelMergeQwenImage",
        "ModelMergeSD1", "ModelMergeSD2", "ModelMergeSD35_Large", "ModelMergeSD3_2B", "ModelMergeSDXL",
        "ModelMergeWAN2_1",
    ),
    "it computes with single weights, which are in the workers": ("LoraSave",),
    "it keeps keys and values in the network from step to step": ("SamplerARVideo",),
    "it asks for gradients, and the network is in the workers": ("TrainLoraNode",),
    "it reads attention maps in there, which stay in the workers": ("SelfAttentionGuidance",),
    "its network is made of torch's own layers by a file that workers do not have": ("HypernetworkLoader",),
    "its network depends on the sigma of each step inside of the network": ("SUPIRApply",),
    "its network depends on the size of each picture along the way": ("WanUni3CControlnetApply",),
    "other than PyTorch's: choose the kernel in Parallel Config": ("ModelAttentionBackend",),
    "other than the default: choose weight_dtype in Parallel Loader": ("ModelComputeDtype",),
    "switch compile on in Parallel Config": ("TorchCompileModel",),
    "Parallel Config has the devices": ("MultiGPU_WorkUnits", "SelectModelDevice"),
    "a ControlNet that is a difference to the model's weights needs them here": ("DiffControlNetLoader",),
}  # fmt: skip
REFUSED: Mapping[str, str] = {name: why for why, names in _NODES.items() for name in names}  # by the type of the node
