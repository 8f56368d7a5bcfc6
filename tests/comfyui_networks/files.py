"""The smallest model file of each family that ComfyUI recognises, as data: those of at most 110 MB."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class File:
    """What is written for a family.

    Args:
        config: what ComfyUI's detection shall say of it, as far as it is not the default of the class.
        extra: tensors of the file that the network has not, by shape.
        metadata: of the transformer, as the file's header says it.
    """

    config: dict[str, Any]
    extra: dict[str, tuple[int, ...]] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)


def wan(kind: str, in_dim: int, out_dim: int = 16, **more: Any) -> dict[str, Any]:
    """What detection says of a narrow Wan."""
    return {
        "image_model": "wan2.1", "model_type": kind, "dim": 256, "ffn_dim": 256, "num_heads": 2, "num_layers": 2,
        "in_dim": in_dim, "out_dim": out_dim, "patch_size": (1, 2, 2), "freq_dim": 256, "window_size": (-1, -1),
        "qk_norm": True, "cross_attn_norm": True, "eps": 1e-6, **more,
    }  # fmt: skip


def _hunyuan(in_channels: int, **more: Any) -> dict[str, Any]:
    return {
        "image_model": "hunyuan_video", "in_channels": in_channels, "patch_size": [1, 2, 2], "out_channels": 16,
        "vec_in_dim": 768, "axes_dim": [16, 56, 56], "meanflow": False, "context_in_dim": 48, "hidden_size": 256,
        "mlp_ratio": 4.0, "num_heads": 2, "depth": 2, "depth_single_blocks": 2, "theta": 256, "qkv_bias": True,
        "byt5": False, "guidance_embed": True, "use_cond_type_embedding": False, "vision_in_dim": None,
        "meanflow_sum": False, **more,
    }  # fmt: skip


def _flux(**more: Any) -> dict[str, Any]:
    return {
        "image_model": "flux", "axes_dim": [16, 56, 56], "num_heads": 2, "mlp_ratio": 4.0, "theta": 10000,
        "out_channels": 16, "qkv_bias": True, "txt_ids_dims": [], "in_channels": 16, "hidden_size": 256,
        "context_in_dim": 48, "patch_size": 2, "vec_in_dim": None, "depth": 2, "depth_single_blocks": 2,
        "guidance_embed": False, "yak_mlp": False, "txt_norm": False, **more,
    }  # fmt: skip


U_NET = {
    "use_checkpoint": False, "image_size": 32, "use_spatial_transformer": True, "legacy": False, "in_channels": 4,
    "out_channels": 4, "model_channels": 320, "use_temporal_resblock": False, "use_temporal_attention": False,
}  # fmt: skip
_LENGTHS = {"learned": ("0.weights", "1.weight", "1.bias"), "expo": ("1.weight", "1.bias")}
_SHAPES = {"0.weights": (128,), "1.weight": (768, 257), "1.bias": (768,)}


def audio(kind: str, lengths: tuple[str, ...], **more: Any) -> File:
    """Stable Audio with what it makes of lengths, which is beside the network."""
    config = {
        "audio_model": "dit1.0", "project_cond_tokens": False, "timestep_features_type": kind, "input_concat_dim": 0,
        **more,
    }  # fmt: skip
    shapes = {"1.weight": (768, 256)} if kind == "expo" else {}
    extra = {
        f"conditioner.conditioners.{length}.embedder.embedding.{name}": shapes.get(name, _SHAPES[name])
        for length in lengths
        for name in _LENGTHS[kind]
    }
    return File(config, extra)


_LTX = {"num_attention_heads": 2, "attention_head_dim": 64, "cross_attention_dim": 128, "caption_channels": 48}
_LTX_2 = {
    **_LTX, "audio_num_attention_heads": 2, "audio_attention_head_dim": 32, "audio_cross_attention_dim": 64,
    "connector_attention_head_dim": 24, "connector_num_attention_heads": 2, "connector_num_layers": 1,
}  # fmt: skip

FILES: dict[str, File] = {
    "wan-t2v": File(wan("t2v", 16)),
    "wan-i2v": File(wan("i2v", 36)),
    "wan-22-5b": File(wan("t2v", 48, 48)),
    "wan-fun-control": File(wan("i2v", 48)),
    "wan-22-i2v": File(wan("t2v", 36)),
    "wan-22-fun-control": File(wan("t2v", 52)),
    "wan-22-5b-fun-control": File(wan("t2v", 148, 48)),
    "wan-22-5b-fun-inpaint": File(wan("t2v", 100, 48)),
    "wan-animate-2": File(wan("animate2", 36), metadata={"model_type": "animate2"}),
    "wan-vace": File(wan("vace", 16, vace_in_dim=96, vace_layers=1)),
    "wan-camera": File(wan("camera", 32)),
    "wan-camera-22": File(wan("camera_2.2", 36)),
    "wan-s2v": File(wan("s2v", 16)),
    "wan-scail": File(wan("scail", 20)),
    "wan-scail-2": File(wan("scail2", 20)),
    "wan-dancer": File(wan("wandancer", 36)),
    "ltx-video": File({"image_model": "ltxv", "num_layers": 2, **_LTX}, metadata=_LTX),
    "ltx-2": File({"image_model": "ltxav", "num_layers": 2, **_LTX_2}, metadata=_LTX_2),
    "minimax-h3": File({
        "image_model": "minimax_h3", "num_layers": 2, "token_refiner_num_layers": 1, "hidden_size": 256,
        "latents_dim": 24, "audio_latents_dim": 32, "attention_head_dim": 128, "num_attention_heads": 2,
        "ffn_hidden_size": 256, "text_dim": 48, "time_embed_hidden_size": 64, "time_embed_dim": 64,
    }),
    "krea-2": File({
        "image_model": "krea2", "features": 256, "channels": 16, "patch": 2, "layers": 2, "heads": 2, "kvheads": 1,
        "txtlayers": 2, "txtdim": 160,
    }),
    "hunyuan-video": File(_hunyuan(16)),
    "hunyuan-video-15": File(_hunyuan(
        65, vec_in_dim=None, out_channels=32, byt5=True, guidance_embed=False, use_cond_type_embedding=True,
        vision_in_dim=1152, meanflow_sum=True,
    )),
    "hunyuan-image": File(_hunyuan(
        64, out_channels=64, vec_in_dim=None, patch_size=[1, 1], axes_dim=[64, 64], byt5=True,
    )),
    "hunyuan-image-distilled": File(_hunyuan(
        64, out_channels=64, vec_in_dim=None, patch_size=[1, 1], axes_dim=[64, 64], byt5=True, meanflow=True,
    )),
    "flux": File(_flux(vec_in_dim=768, guidance_embed=True)),
    "flux-schnell": File(_flux(vec_in_dim=768)),
    "flux-fill": File(_flux(vec_in_dim=768, guidance_embed=True, in_channels=96)),
    "flux-canny": File(_flux(vec_in_dim=768, guidance_embed=True, in_channels=32)),
    "flux-2": File(_flux(
        image_model="flux2", axes_dim=[32] * 4, mlp_ratio=3.0, theta=2000, out_channels=128, in_channels=128,
        global_modulation=True, mlp_silu_act=True, qkv_bias=False, ops_bias=False, default_ref_method="index",
        ref_index_scale=10.0, txt_ids_dims=[3], patch_size=1, guidance_embed=True,
    )),
    "ovis": File(_flux(yak_mlp=True, txt_norm=True, txt_ids_dims=[1, 2])),
    "longcat": File(_flux(context_in_dim=3584, txt_ids_dims=[1, 2])),
    "lens": File({
        "image_model": "lens", "in_channels": 128, "out_channels": 32, "num_layers": 2, "num_attention_heads": 2,
        "enc_hidden_dim": 48, "multi_layer_encoder_feature": True, "selected_layer_index": (0, 1),
    }),
    "joyimage": File({
        "image_model": "joyimage", "in_channels": 16, "hidden_size": 256, "patch_size": [1, 2, 2], "num_layers": 2,
        "num_attention_heads": 2, "text_dim": 4096,
    }),
    "kandinsky-5": File({
        "image_model": "kandinsky5", "model_dim": 128, "time_dim": 64, "ff_dim": 256, "visual_embed_dim": 132,
        "num_text_blocks": 1, "num_visual_blocks": 2,
    }),
    "sd3": File({
        "in_channels": 16, "patch_size": 2, "out_channels": 16, "depth": 2, "input_size": None,
        "adm_in_channels": 32, "num_patches": 64, "pos_embed_max_size": 8, "qk_norm": "rms",
        "context_embedder_config": {
            "target": "torch.nn.Linear", "params": {"in_features": 48, "out_features": 128},
        },
        "pos_embed_scaling_factor": None, "x_block_self_attn_layers": [0],
    }),
    "cogvideox": File({
        "image_model": "cogvideox", "num_attention_heads": 2, "attention_head_dim": 64, "time_embed_dim": 64,
        "num_layers": 2, "in_channels": 16, "patch_size": 2, "text_embed_dim": 48,
        "use_rotary_positional_embeddings": True, "use_learned_positional_embeddings": False,
    }),
    "hunyuan-3d-2": File({
        "image_model": "hunyuan3d2", "in_channels": 64, "context_in_dim": 48, "hidden_size": 256, "mlp_ratio": 4.0,
        "num_heads": 16, "depth": 2, "depth_single_blocks": 2, "qkv_bias": True, "guidance_embed": False,
    }),
    "hunyuan-3d-21": File({
        "image_model": "hunyuan3d2_1", "in_channels": 64, "context_dim": 1024, "hidden_size": 256,
        "mlp_ratio": 4.0, "num_heads": 16, "depth": 3, "qkv_bias": False, "guidance_cond_proj_dim": None,
    }),
    "stable-audio-3": audio(
        "expo", ("seconds_total",), global_cond_dim=768, embed_dim=768, io_channels=256, local_add_cond_dim=257,
        num_heads=12, depth=1, global_cond_shared_embed=True, global_cond_type="adaLN", num_memory_tokens=4,
        norm_type="rms_norm", attn_kwargs={"qk_norm": "rms", "differential": True},
    ),
    "sd15": File({
        **U_NET, "adm_in_channels": None, "num_res_blocks": [1], "transformer_depth": [1],
        "transformer_depth_output": [1, 1], "channel_mult": [1], "transformer_depth_middle": 1,
        "use_linear_in_transformer": False, "context_dim": 768,
    }),
    "lotus": File({
        **U_NET, "num_classes": "sequential", "adm_in_channels": 4, "num_res_blocks": [1], "transformer_depth": [1],
        "transformer_depth_output": [1, 0], "channel_mult": [1], "transformer_depth_middle": 1,
        "use_linear_in_transformer": True, "context_dim": 1024,
    }),
}  # fmt: skip
