"""Networks that make video, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...said import said
from .blocks import OPTIONS, Blocks, Network
from .image import FLUX, PREDICT_2

_LTX_VIDEO = Blocks(
    "transformer_blocks", {"x": 1}, ("x",), joint={"pe": 1},
    rows={"timestep": ("x", 1), "self_attention_mask": ("x", 1)}, cross=("attn2",),
    alike=("context", "attention_mask", "prompt_timestep", *OPTIONS), longer={"context": 1},
)  # fmt: skip

# The audio stream is short: it is whole on every rank, and the video's tokens are shared out.
_SOUND = ("a_context", "a_timestep", "a_pe", "a_cross_pe", "a_cross_scale_shift_timestep", "a_cross_gate_timestep")
_LTX_2 = Blocks(
    "transformer_blocks", {"x.0": 1}, ("x.0", None), joint={"v_pe": 1, "v_cross_pe": 1},
    rows=dict.fromkeys(
        ("v_timestep", "v_cross_scale_shift_timestep", "v_cross_gate_timestep", "self_attention_mask"), ("x.0", 1)
    ),
    cross=("attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn"), gathers=("video_to_audio_attn",),
    alike=("v_context", *_SOUND, "attention_mask", "v_prompt_timestep", "a_prompt_timestep", *OPTIONS),
    longer=dict.fromkeys(("v_context", "x.1", *_SOUND), 1),
    counts=("num_frames", "patches_per_frame", "intervals"),
)  # fmt: skip

_COG_VIDEO = Blocks(
    "blocks", {"encoder_hidden_states": 1, "hidden_states": 1}, ("hidden_states", "encoder_hidden_states"),
    rows={"image_rotary_emb": ("hidden_states", 0)}, alike=("temb", *OPTIONS),
    modulations={"temb": ("norm1.linear", "norm2.linear")},
)  # fmt: skip

_COSMOS = Blocks(
    "blocks", {"x": 0}, ("x",), joint={"rope_emb_L_1_1_D": 0}, grids=("x",), cross=("blocks.1",),
    when={"blocks.1.block_type": "ca", "x_format": "THWBD"},
    alike=("emb_B_D", "crossattn_emb", "crossattn_mask", "adaln_lora_B_3D", *OPTIONS), longer={"crossattn_emb": 0},
)  # fmt: skip

_MINIMAX_H3 = Blocks(
    "blocks", {"x": 0}, ("x",), joint={"rope_freqs": 1}, segments={"mod_segments": "x"}, alike=("t_emb", *OPTIONS),
    whole_with=("attention",),  # of newer ComfyUIs: what a patch of the whole block attends with
)  # fmt: skip

_KANDINSKY_5 = Blocks(
    "visual_transformer_blocks", {"visual_embed": 1}, ("visual_embed",), joint={"freqs": 1},
    cross=("cross_attention",), alike=("text_embed", "time_embed", *OPTIONS), longer={"text_embed": 1},
    modulations={"time_embed": ("visual_modulation.out_layer",)},
)  # fmt: skip

VIDEO: Mapping[str, Network] = {
    "comfy.ldm.minimax.model:MiniMaxH3Model": Network(
        "MiniMax H3", (_MINIMAX_H3,), heads="blocks.0.attn.heads", head_dim="blocks.0.attn.head_dim", rescales=True
    ),
    "comfy.ldm.lightricks.model:LTXVModel": Network("LTX-Video", (_LTX_VIDEO,), heads="num_attention_heads"),
    "comfy.ldm.lightricks.av_model:LTXAVModel":
        Network("LTX-2 to 2.5", (_LTX_2,), heads="num_attention_heads", width="inner_dim"),
    "comfy.ldm.hunyuan_video.model:HunyuanVideo":
        Network("HunyuanVideo and HunyuanImage", FLUX, sigmas_with="time_r_in", stages=True),
    "comfy.ldm.kandinsky5.model:Kandinsky5":
        Network("Kandinsky 5", (_KANDINSKY_5,), heads="visual_transformer_blocks.0.self_attention.num_heads"),
    "comfy.ldm.kandinsky6.model:Kandinsky6": Network(
        "Kandinsky 6", read="0.38",
        whole=said("its video and sound attend to one another by calls that say nothing of how"),
    ),
    "comfy.ldm.prism.model:Prism": Network(
        "Prism", whole=said("its video and sound attend to one another between blocks that stand in pairs"),
        read="a proposed change",
    ),
    "comfy.ldm.cosmos.predict2:MiniTrainDIT": Network("Cosmos-Predict 2", (PREDICT_2,)),
    "comfy.ldm.cosmos.model:GeneralDIT": Network("Cosmos 1", (_COSMOS,)),
    "comfy.ldm.cogvideo.model:CogVideoXTransformer3DModel":
        Network("CogVideoX", (_COG_VIDEO,), heads="num_attention_heads"),
    "comfy.ldm.genmo.joint_model.asymm_models_joint:AsymmDiTJoint":
        Network("Mochi", whole=said("its blocks crop their text tokens to the prompt's length")),
    "comfy.ldm.seedvr.model:NaDiT": Network(
        "SeedVR2", whole=said("it attends within windows of frames, rows and columns, of many lengths"),
        rows_together=True, read_outside=("positive_conditioning", "negative_conditioning"),
    ),
}  # fmt: skip


_CONTEXT = ("context", "context_img_len", *OPTIONS)
_TEXT = {"context": 1}

# References and poses may follow the video, and then timesteps by frame need not divide the tokens.
_WAN = Blocks(
    "blocks", {"x": 1}, ("x",), joint={"freqs": 1}, rows={"e": ("x", 1)}, stretched=("e",), cross=("cross_attn",),
    alike=_CONTEXT, longer=_TEXT, patched=("attn1_patch", "attn2_patch"), latent="x",
)  # fmt: skip
# These have one timestep, and e is (B, 6, D).
_ONE_TIMESTEP = replace(_WAN, rows={}, stretched=(), alike=("e", *_CONTEXT))
_VACE = Blocks(
    "vace_blocks", {"c": 1}, ("c", "c"), joint={"freqs": 1}, rows={"x": ("c", 1)}, cross=("cross_attn",),
    alike=("e", *_CONTEXT), longer=_TEXT,
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
        "Wan Animate 2", whole=said("each of its frames attends to keys of its own pose beside those of all frames")
    ),
    "comfy.ldm.wan.model_wandancer:WanDancerModel": Network("WanDancer", (_WAN,)),
    "comfy.ldm.wan.ar_model:CausalWanModel": Network("Wan Causal", (_CAUSAL,)),
}
