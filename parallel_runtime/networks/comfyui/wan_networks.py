"""Wan and its relatives as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .blocks import Blocks, Network

_CONTEXT = ("context", "context_img_len", "transformer_options")

# References and poses may follow the video, and then timesteps by frame need not divide the tokens.
_WAN = Blocks(
    "blocks", {"x": 1}, ("x",), joint={"freqs": 1}, rows={"e": ("x", 1)}, stretched=("e",), cross=("cross_attn",),
    alike=_CONTEXT, patched=("attn1_patch", "attn2_patch"), latent="x",
)  # fmt: skip
# These have one timestep, and e is (B, 6, D).
_ONE_TIMESTEP = replace(_WAN, rows={}, stretched=(), alike=("e", *_CONTEXT))
_VACE = Blocks(
    "vace_blocks", {"c": 1}, ("c", "c"), joint={"freqs": 1}, rows={"x": ("c", 1)}, cross=("cross_attn",),
    alike=("e", *_CONTEXT),
)  # fmt: skip
_HUMO = replace(_WAN, apart=("audio_cross_attn_wrapper",), alike=("audio", *_CONTEXT))
_CAUSAL = replace(_WAN, whole_with=("kv_cache", "crossattn_cache"))

WAN: Mapping[str, Network] = {
    "comfy.ldm.wan.model:WanModel": Network("Wan", (_WAN,), stages=True),
    "comfy.ldm.wan.model:VaceWanModel": Network("Wan VACE", (_ONE_TIMESTEP, _VACE)),
    "comfy.ldm.wan.model:CameraWanModel": Network("Wan Camera", (_ONE_TIMESTEP,), stages=True),
    "comfy.ldm.wan.model:WanModel_S2V": Network("Wan S2V", (_WAN,), stages=True),
    "comfy.ldm.wan.model:HumoWanModel": Network("HuMo", (_HUMO,), stages=True),
    "comfy.ldm.wan.model:SCAILWanModel": Network("SCAIL", (_WAN,)),
    "comfy.ldm.wan.model:SCAIL2WanModel": Network("SCAIL 2", (_WAN,)),
    "comfy.ldm.wan.model_animate:AnimateWanModel": Network("Wan Animate", (_WAN,)),
    "comfy.ldm.wan.model_animate2:WanAnimate2Model": Network(
        "Wan Animate 2", whole="each frame attends to keys of its own, those of its pose, beside those of all frames"
    ),
    "comfy.ldm.wan.model_wandancer:WanDancerModel": Network("WanDancer", (_WAN,)),
    "comfy.ldm.wan.ar_model:CausalWanModel": Network("Wan Causal", (_CAUSAL,)),
}
