"""What official templates have that ComfyUI 0.33, the newest that this project has run, has not: nodes and networks."""

from __future__ import annotations

import re
from collections.abc import Iterable

NEWEST_RUN = "0.33"
NODES = frozenset(
    (
        "BlockSparseAttention", "CameraAngle", "ConditioningLoader", "EmptyYuE2LatentAudio", "EndLoop",
        "Flux3LayoutPrompt", "GetItemFromList", "MOSSImageControl", "MOSSImageLayoutPrompt", "MarigoldV2PostProcess",
        "MiniMaxH3FunControlNetApply", "Pixal3DMultiViewConditioning", "QwenImage21Cache", "ReferenceMultiLatent",
        "SheetSage2AudioToABC", "StartLoop", "TextEncodeFibo2", "TextEncodeMOSSImageEdit", "TextEncodeMingImageEdit",
        "TextEncodeQwenImage21", "YuE2GenerateABC", "YuE2GenerateMusic",
    )
)  # fmt: skip
"""Nodes that a server would run; a host test holds that the ComfyUI which is here has none of them."""
FILES: tuple[tuple[str, str], ...] = (
    (r"qwen_image_2\.1", "Qwen-Image 2.1"),
    (r"flux3", "FLUX.3 klein"),
    (r"fasth3", "FastH3"),
    (r"moss_image", "MOSS-Image"),
    (r"ming_image", "Ming-Image"),
    (r"fibo2", "FIBO 2"),
    (r"yue2", "YuE 2"),
)
"""Pattern of a file's name -> a network that came later."""


def lacking(kinds: Iterable[str], files: Iterable[str]) -> tuple[str, ...]:
    """What a ComfyUI of NEWEST_RUN lacks of a template: networks, then nodes."""
    networks = [title for pattern, title in FILES if any(re.search(pattern, file.lower()) for file in files)]
    return (*(f"the network {title}" for title in networks), *sorted(NODES.intersection(kinds)))
