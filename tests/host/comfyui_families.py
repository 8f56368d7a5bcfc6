"""What the nodes of a family make, for the files of tests/comfyui_networks/files.py and large_files.py."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from .workflow import SAMPLER, SAVE, Prompt, Workflow, link, node, put_control


@dataclass(frozen=True)
class ComfyFamily:
    """A family's latent and conditionings.

    Args:
        latents: shapes; several as video with audio has them.
        text: tokens and width.
        pooled: width of the pooled text.
        negative_tokens: of the negative text; None as many.
        values: what else its nodes put into a conditioning; see ConditioningValues of the test pack.
        negative: what of `values` is another in the negative one.
        mask: it has a noise mask.
        per_step: why Parallel Sampler runs it per step; "" where the pool has its loop.
        control: width of a ControlNet of its class, where it has one.
        sigma: the largest. Samplers subtract from noise as large as that, whose last place is then the latent's.
    """

    latents: list[list[int]]
    text: tuple[int, int]
    pooled: int = 32
    negative_tokens: int | None = None
    values: dict[str, Any] = field(default_factory=dict)
    negative: dict[str, Any] = field(default_factory=dict)
    mask: bool = False
    per_step: str = ""
    control: int = 0
    sigma: float = 1.0

    def graph(self, workflow: Workflow) -> Prompt:
        """The workflow's graph with this family's latent and conditionings."""
        graph = workflow.prompt()
        graph["latent"] = node("TestEmptyLatents", shapes=json.dumps(self.latents))
        length, width = self.text
        tokens = {"positive": length, "negative": self.negative_tokens or length}
        for name, more in (("positive", {}), ("negative", self.negative)):
            graph[name]["inputs"] |= {"length": tokens[name], "width": width, "pooled": self.pooled}
            if values := self.values | more:
                graph[f"{name} text"] = graph[name]
                made = node("TestConditioningValues", conditioning=link(f"{name} text"), values=json.dumps(values))
                graph[name] = made
        if self.mask:
            height, width = self.latents[0][-2:]
            graph["mask"] = node("TestRandomMask", seed=3, height=height * 8, width=width * 8)
            graph["masked"] = node("SetLatentNoiseMask", samples=link("latent"), mask=link("mask"))
            graph[SAMPLER]["inputs"]["latent_image"] = link("masked")
        if self.control:
            net = node("TestControlNet", kind="qwen-image", width=self.control)
            settings = {"strength": 0.8, "start_percent": 0.0, "end_percent": 1.0}
            put_control(graph, net, settings, node("TestVae", channels=16, video=True))
        graph["packed"] = node("TestPackedLatent", samples=link(SAMPLER))
        graph[SAVE]["inputs"]["samples"] = link("packed")
        return graph


def _fields(**fields: list[int]) -> dict[str, Any]:
    return {"fields": fields}


_SEEN = _fields(penultimate_hidden_states=[1, 257, 1280])
_VIDEO = [1, 16, 3, 6, 10]
_START = {"concat_latent_image": _VIDEO, "concat_mask": [1, 1, 3, 6, 10]}
_CAMERA = {"camera_conditions": [1, 24, 3, 48, 80]}
_SQUARE = [1, 16, 3, 8, 8]
_SCAIL = {
    "clip_vision_output": _SEEN, "pose_video_latent": [1, 16, 3, 4, 4],
    "reference_latents": {"list": [[1, 16, 1, 8, 8]]},
}  # fmt: skip
_KEPT = {"attention_mask": {"length": 9, "kept": 5}}
_ALL = {"attention_mask": {"length": 9, "kept": 9}}
_TEXT = (9, 48)
_T5 = (9, 4096)

FAMILIES: dict[str, ComfyFamily] = {
    "wan-t2v": ComfyFamily([_VIDEO], _T5),
    "wan-i2v": ComfyFamily([_VIDEO], _T5, values={"clip_vision_output": _SEEN, **_START}),
    "wan-22-5b": ComfyFamily([[1, 48, 3, 6, 10]], _T5, mask=True),
    "wan-fun-control": ComfyFamily(
        [_VIDEO], _T5, values={"clip_vision_output": _SEEN, "concat_latent_image": [1, 32, 3, 6, 10]}
    ),
    "wan-vace": ComfyFamily(
        [_VIDEO],
        _T5,
        values={
            "vace_frames": {"list": [[1, 32, 3, 6, 10]]},
            "vace_mask": {"list": [[1, 64, 3, 6, 10]]},
            "vace_strength": {"plain": [0.8]},
        },
    ),
    "wan-camera": ComfyFamily(
        [_VIDEO], _T5, values={"clip_vision_output": _SEEN, "concat_latent_image": _VIDEO, **_CAMERA}
    ),
    "wan-camera-22": ComfyFamily([_VIDEO], _T5, values={**_START, **_CAMERA}),
    "wan-s2v": ComfyFamily(
        [_SQUARE],
        _T5,
        values={
            "audio_embed": [1, 25, 1024, 12],
            "reference_latents": {"list": [[1, 16, 1, 8, 8]]},
            "control_video": _SQUARE,
            "reference_motion": [1, 16, 19, 8, 8],
        },
    ),
    "wan-scail": ComfyFamily([_SQUARE], _T5, values=_SCAIL),
    "wan-scail-2": ComfyFamily(
        [_SQUARE],
        _T5,
        values={
            **_SCAIL,
            "driving_mask_28ch": [1, 3, 28, 4, 4],
            "ref_mask_28ch": [1, 4, 28, 8, 8],
            "ref_mask_flag": False,
        },
    ),
    "wan-dancer": ComfyFamily(
        [_SQUARE],
        _T5,
        values={
            "clip_vision_output": _SEEN,
            "clip_vision_output_ref": _SEEN,
            "audio_embed": [1, 40, 35],
            "fps": 15.0,
            "concat_latent_image": _SQUARE,
        },
    ),
    "ltx-video": ComfyFamily([[1, 128, 3, 4, 7]], _TEXT, values={"frame_rate": 24, **_ALL}, negative=_KEPT, mask=True),
    "ltx-2": ComfyFamily([[1, 128, 3, 4, 7], [1, 8, 13, 16]], (9, 96), mask=True),
    "minimax-h3": ComfyFamily([[1, 24, 3, 6, 8], [1, 32, 2, 11]], _TEXT),
    "krea-2": ComfyFamily([[1, 16, 10, 14]], (9, 320), values={"reference_latents": {"list": [[1, 16, 6, 6]]}}),
    "hunyuan-video": ComfyFamily(
        [_VIDEO],
        _TEXT,
        pooled=768,
        negative_tokens=5,  # ComfyUI takes no masks of two texts at once
        values=_KEPT,
        negative={"attention_mask": {"length": 5, "kept": 3}},
    ),
    "hunyuan-video-15": ComfyFamily(
        [[1, 32, 3, 6, 10]],
        _TEXT,
        values={
            "conditioning_byt5small": [1, 5, 1472],
            "clip_vision_output": _fields(last_hidden_state=[1, 7, 1152]),
            "concat_latent_image": [1, 32, 3, 6, 10],
            "concat_mask": [1, 1, 3, 6, 10],
        },
    ),
    "hunyuan-image": ComfyFamily([[1, 64, 5, 7]], _TEXT, values={"conditioning_byt5small": [1, 5, 1472]}),
    "hunyuan-image-distilled": ComfyFamily([[1, 64, 5, 7]], _TEXT, values={"conditioning_byt5small": [1, 5, 1472]}),
    "flux-2": ComfyFamily([[1, 128, 7, 9]], _TEXT, values={"reference_latents": {"list": [[1, 128, 4, 5]]}}),
    "ovis": ComfyFamily([[2, 16, 9, 7]], _TEXT),
    "longcat": ComfyFamily([[2, 16, 9, 7]], (9, 3584)),
    "lens": ComfyFamily([[2, 128, 5, 7]], (9, 96), values=_ALL, negative=_KEPT),
    "joyimage": ComfyFamily([[1, 16, 1, 6, 10]], _T5, values={"reference_latents": {"list": [[1, 16, 1, 4, 6]]}}),
    "kandinsky-5": ComfyFamily([_VIDEO], (9, 3584), pooled=768),
    "sd3": ComfyFamily([[2, 16, 9, 7]], _TEXT),
    "cogvideox": ComfyFamily([_VIDEO], _TEXT, sigma=4519.0),
    "hunyuan-3d-2": ComfyFamily([[1, 64, 37]], _TEXT),
    "hunyuan-3d-21": ComfyFamily([[1, 64, 37]], (9, 1024)),
    "stable-audio-3": ComfyFamily([[1, 256, 45]], (9, 768), values={"seconds_total": 30}),
    "sd15": ComfyFamily([[1, 4, 9, 7]], (77, 768)),
}
LARGE_FAMILIES: dict[str, ComfyFamily] = {
    "wan-humo": ComfyFamily([_VIDEO], _T5, values={"audio_embed": [1, 3, 8, 5, 1280]}),
    "wan-animate": ComfyFamily(
        [_VIDEO], _T5, values={"clip_vision_output": _SEEN, "pose_video_latent": [1, 16, 2, 6, 10], **_START}
    ),
    "ace-step-15": ComfyFamily(
        [[1, 64, 45]],
        (9, 1024),
        values={"conditioning_lyrics": [1, 7, 1024], "reference_audio_timbre_latents": {"list": [[1, 64, 60]]}},
    ),
    "lumina-2": ComfyFamily([[2, 16, 9, 7]], _TEXT, values=_ALL, negative=_KEPT),
    "z-image": ComfyFamily([[2, 16, 9, 7]], _TEXT),
    "qwen-image": ComfyFamily(
        [[1, 16, 1, 6, 10]],
        (9, 3584),
        values={"reference_latents": {"list": [[1, 16, 1, 4, 6]]}, **_ALL},
        negative=_KEPT,
        per_step="a ControlNet",
        control=3072,
    ),
    "mage-flow": ComfyFamily([[1, 128, 5, 7]], (9, 2560)),
    "auraflow": ComfyFamily([[2, 4, 9, 7]], (9, 2048)),
    "cosmos-predict-2": ComfyFamily([_VIDEO], (9, 1024)),
    "anima": ComfyFamily(
        [[1, 16, 1, 6, 10]], (9, 1024), values={"t5xxl_ids": {"integers": [3, 1, 4, 1, 5]}, "t5xxl_weights": [5]}
    ),
    "ideogram-4": ComfyFamily([[1, 128, 5, 7]], (9, 53248), values=_ALL, negative=_KEPT),
    "chroma": ComfyFamily([[2, 16, 9, 7]], _TEXT),
    "stable-audio": ComfyFamily([[1, 64, 45]], (9, 768), values={"seconds_total": 30}, negative={"seconds_start": 4}),
    "svd": ComfyFamily(
        [[5, 4, 9, 7]],
        (1, 1024),
        values={"concat_latent_image": [1, 4, 9, 7], "motion_bucket_id": 127},
    ),
    "zero123": ComfyFamily([[1, 4, 9, 7]], (1, 772), values={"concat_latent_image": [1, 4, 9, 7]}),
}
"""Those of most use are in test_executed_templates.py, too."""
