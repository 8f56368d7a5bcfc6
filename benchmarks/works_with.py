"""Writes docs/works-with.md, what becomes of each node that takes a MODEL, and what was measured of them:
`python -m benchmarks.works_with`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from nodes.model_nodes import REFUSED

PAGE = Path(__file__).parents[1] / "docs" / "works-with.md"
RESULTS = Path(__file__).parent / "results" / "works_with.json"
MEASURED = RESULTS.with_suffix(".md")
_HEAD = """# Works with

<!-- Made by `python -m benchmarks.works_with`; tests/nodes/test_model_nodes.py holds it against the ComfyUI that is
present. -->

What ComfyUI's nodes that take a MODEL do with the one of Parallel Loader. What is refused stops with a message that
names the node; Load Diffusion Model still does what it did.

ControlNets (Load ControlNet Model, Apply ControlNet) run in ComfyUI's process as always, and their residuals travel to
the ranks with each step. One that is made of the model's weights (ControlLoRA, Stability's of SD3.5), or that runs
layers of the model (Qwen-Image Fun), has those of the file, which ComfyUI's process reads for that once. A LoRA on the
model is in these weights, as it is in ComfyUI's own.

Nodes of other packs: what they put around the network's call (a function wrapper, wrappers of a run or of a call, CFG
functions) runs in ComfyUI's process, as for any MODEL, so a cache that leaves out whole calls works. One that puts
another forward into the network while it is called, as TeaCache does, is refused by what it replaced.
"""

_MEASURED = """# Nodes that take a MODEL, measured

`python -m benchmarks.node_distances` runs each node that makes a MODEL of one MODEL and plain values, with the node's
defaults, on a tiny FLUX in a real ComfyUI: with Load Diffusion Model, and with Parallel Loader on two ranks (CPU,
float32, CFG, 3 steps). The number is the largest difference between the two latents, of their scale; "idle": the node
changes nothing on this model with its defaults. ComfyUI 0.8.0 opens no FLUX that small, and ran a tiny SD3; what it
has no node for is left open.
tests/host/test_model_nodes.py has more, with values and on the models that nodes are made for.
"""


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
    **_each(How.FILE, "ModelSave", "CheckpointSave", "ImageOnlyCheckpointSave"),
    **{name: ModelNode(How.REFUSED, why) for name, why in REFUSED.items()},
}  # fmt: skip
"""By the type of the node."""


def _verdict(found: Mapping[str, Any]) -> str:
    if "distance" in found:
        return f"{found['distance']:.0e}" + ("" if found["effect"] else ", idle")
    if "ours said" in found:
        return "fails with Load Diffusion Model, too" if "alone said" in found else "refused"
    return "–"


def write_page() -> str:
    """The page's text."""
    lines = [_HEAD]
    for how in How:
        named = {name: node for name, node in MODEL_NODES.items() if node.how is how}
        lines.append(f"## {how.value[0].upper()}{how.value[1:]}\n")
        if how is not How.REFUSED:
            lines.append(", ".join(f"`{name}`" for name in sorted(named)) + ".\n")
            lines += [f"`{name}`: {node.why}.\n" for name, node in sorted(named.items()) if node.why]
            continue
        lines.append("| Node | Why, or what to do |\n|---|---|")
        reasons = dict.fromkeys(node.why for node in named.values())
        for why in reasons:
            names = ", ".join(f"`{name}`" for name in sorted(named) if named[name].why == why)
            lines.append(f"| {names} | {why} |")
    lines.append("\nHow far each is from Load Diffusion Model was [measured](../benchmarks/results/works_with.md).")
    return "\n".join(lines) + "\n"


def write_measured() -> str:
    """The page of what the suite found, by node and version of ComfyUI."""
    results: Mapping[str, Mapping[str, Mapping[str, Any]]] = json.loads(RESULTS.read_text(encoding="utf-8"))
    versions = list(results)
    lines = [_MEASURED, f"| Node | {' | '.join(f'ComfyUI {version}' for version in versions)} |"]
    lines.append("|---" * (len(versions) + 1) + "|")
    for name in sorted(set().union(*results.values())):
        found = [results[version].get(name, {}) for version in versions]
        if any("distance" in each or "ours said" in each for each in found):
            lines.append(f"| `{name}` | {' | '.join(map(_verdict, found))} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(write_page(), encoding="utf-8")
    MEASURED.write_text(write_measured(), encoding="utf-8")
