"""The small file that stands for one that a template names, and the shapes of what its text encoder and VAE give."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class SmallFile:
    """A file of tests/comfyui_networks, and its surroundings.

    Args:
        key: in the tables of files there.
        spec: see stand_ins/.
        number: of the file where a template has several of one key; each has weights of its own.
    """

    key: str
    spec: Mapping[str, Any]
    number: int = 1

    @property
    def stem(self) -> str:
        """Of the file's name."""
        return self.key if self.number == 1 else f"{self.key}-{self.number}"

    @property
    def name(self) -> str:
        """Of the file in models/diffusion_models."""
        return f"{self.stem}.safetensors"


def _vae(channels: int, factor: int = 8, frames: int = 1, dims: int = 2) -> dict[str, int]:
    return {"channels": channels, "factor": factor, "frames": frames, "dims": dims}


_CLIP_H = {"penultimate_hidden_states": [257, 1280], "last_hidden_state": [257, 1280], "image_embeds": [1024]}
_CLIP_G = {**_CLIP_H, "image_embeds": [1280]}
_SIGLIP = {"penultimate_hidden_states": [7, 1152], "last_hidden_state": [7, 1152], "image_embeds": [1152]}


def _spec(width: int, vae: Mapping[str, int], *, pooled: int = 768, length: int = 9, **values: Any) -> dict[str, Any]:
    seen, control = values.pop("seen", _CLIP_H), values.pop("control", 256)
    patch = {"patch": values.pop("patch")} if "patch" in values else {}
    return {
        "width": width, "length": length, "pooled": pooled, "vae": vae, "seen": seen, "control": control,
        "values": values, **patch,
    }  # fmt: skip


_WAN = _spec(4096, _vae(16, 8, 4, 3))
_WAN_5B = _spec(4096, _vae(48, 16, 4, 3))
_FLUX = _spec(48, _vae(16))
_HUNYUAN_15 = _spec(48, _vae(32, 16, 4, 3), conditioning_byt5small=[1, 5, 1472], seen=_SIGLIP)
_AUDIO = _spec(768, _vae(64, 2048, 1, 1))

FILES: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    (r"^pid_", "", {}),
    (r"minimax_h3", "minimax-h3", _spec(48, _vae(24, 16, 8, 3))),
    (r"ltx-2", "ltx-2", _spec(96, _vae(128, 32, 8, 3))),
    (r"ltx-video", "ltx-video", _spec(48, _vae(128, 32, 8, 3), attention_mask={"ones": [1, 9]})),
    (r"wan.*scail_?2", "wan-scail-2", _WAN),
    (r"wan.*animate_?2", "wan-animate-2", _WAN),
    (r"wan.*animate", "wan-animate", _WAN),
    (r"wan.*scail", "wan-scail", _WAN),
    (r"wan.*s2v", "wan-s2v", {**_WAN, "heard": [25, 1024]}),
    (r"humo", "wan-humo", {**_WAN, "heard": [33, 1280]}),
    (r"wan.*dancer", "wan-dancer", _WAN),
    (r"wan2\.2_ti2v_5b", "wan-22-5b", _WAN_5B),
    (r"wan2\.2_fun_control_5b", "wan-22-5b-fun-control", _WAN_5B),
    (r"wan2\.2_fun_inpaint_5b", "wan-22-5b-fun-inpaint", _WAN_5B),
    (r"wan2\.2_fun_camera", "wan-camera-22", _WAN),
    (r"fun_camera", "wan-camera", _WAN),
    (r"wan2\.2_fun_control", "wan-22-fun-control", _WAN),
    (r"wan2\.1_fun_control", "wan-fun-control", _WAN),
    (r"wan2\.2_(i2v|fun_inpaint)", "wan-22-i2v", _WAN),
    (r"wan.*(i2v|flf2v|wanmove|fun_inp)|chrono_edit", "wan-i2v", _WAN),
    (r"vace", "wan-vace", _WAN),
    (r"wan.*(t2v|bernini)", "wan-t2v", _WAN),
    (r"netayume|newbie|lumina", "lumina-2", _spec(48, _vae(16), attention_mask={"ones": [1, 9]})),
    (r"z_image", "z-image", _spec(48, _vae(16))),
    (r"layered", "qwen-image-layered", _spec(3584, _vae(16, 8, 4, 3))),
    (r"qwen_image|firered", "qwen-image", _spec(3584, _vae(16, 8, 4, 3), control=3072, patch=3072)),
    (r"krea2", "krea-2", _spec(320, _vae(16))),
    (r"chroma-radiance", "chroma-radiance", _spec(48, _vae(3, 1))),
    (r"chroma1", "chroma", _spec(48, _vae(16))),
    (r"boogu", "boogu", _spec(48, _vae(16), attention_mask={"ones": [1, 9]})),
    (r"flux.?2", "flux-2", _spec(48, _vae(128, 16))),
    (r"flux\.?1-fill", "flux-fill", _FLUX),
    (r"flux1-(canny|depth)", "flux-canny", _FLUX),
    (r"flux1-schnell", "flux-schnell", _FLUX),
    (r"flux1", "flux", _FLUX),
    (r"longcat", "longcat", _spec(3584, _vae(16))),
    (r"ovis", "ovis", _spec(48, _vae(16))),
    (r"capybara|hunyuanvideo1\.5", "hunyuan-video-15", _HUNYUAN_15),
    (r"hunyuan_video", "hunyuan-video", _spec(48, _vae(16, 8, 4, 3))),
    (r"anima", "anima", _spec(1024, _vae(16, 8, 4, 3), t5xxl_ids={"integers": [3, 1, 4]}, t5xxl_weights=[3])),
    (r"mage_flow", "mage-flow", _spec(2560, _vae(128, 16))),
    (r"ace_?step_?v?1\.5", "ace-step-15", _spec(1024, _vae(64, 1920, 1, 1), conditioning_lyrics=[1, 7, 1024])),
    (r"stable[-_]audio_3", "stable-audio-3", _spec(768, _vae(256, 4096, 1, 1))),
    (r"stable[-_]audio", "stable-audio", _AUDIO),
    (r"ideogram4", "ideogram-4", _spec(53248, _vae(128, 16), attention_mask={"ones": [1, 9]})),
    (r"sd3", "sd3", _spec(48, _vae(16), pooled=32, control=128)),
    (r"kandinsky5", "kandinsky-5", _spec(3584, _vae(16, 8, 4, 3))),
    (r"void_pass", "cogvideox", _spec(48, _vae(16, 8, 4, 3))),
    (r"lens_", "lens", _spec(96, _vae(128, 16), attention_mask={"ones": [1, 9]})),
    (r"joyai", "joyimage", _spec(4096, _vae(16, 8, 4, 3))),
    (r"hunyuan_3d_v2\.1", "hunyuan-3d-21", _spec(1024, _vae(64), seen={"last_hidden_state": [7, 1024]})),
    (r"hunyuan3d-dit-v2", "hunyuan-3d-2", _spec(48, _vae(64), seen={"last_hidden_state": [7, 48]})),
    (r"sd_xl_(base|turbo)", "sdxl", _spec(2048, _vae(4), pooled=1280, length=77, seen=_CLIP_G)),
    (r"sd_xl_refiner", "sdxl-refiner", _spec(1280, _vae(4), pooled=1280, length=77)),
    (r"^svd", "svd", _spec(1024, _vae(4))),
    (r"lotus", "lotus", _spec(1024, _vae(4))),
)
"""Pattern of a file's name -> key and surroundings; the first that fits. Without a key there is no small file."""


def small_files(files: Sequence[str]) -> dict[str, SmallFile] | None:
    """What stands for each of a template's files; None where there is none for one of them."""
    chosen: dict[str, SmallFile] = {}
    for file in files:
        found = find_small_file(file)
        if found is None:
            return None
        number = 1 + sum(each.key == found.key for each in chosen.values())
        chosen[file] = replace(found, number=number)
    return chosen


def find_small_file(file: str) -> SmallFile | None:
    """What stands for a file; None where ComfyUI recognises its full size alone."""
    name = file.lower().replace("\\", "/").rsplit("/", 1)[-1]
    found = next(((key, spec) for pattern, key, spec in FILES if re.search(pattern, name)), None)
    return SmallFile(*found) if found is not None and found[0] else None
