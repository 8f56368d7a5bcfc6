"""As files.py, families of which ComfyUI recognises large files only; and those that are too large even for that."""

from __future__ import annotations

import torch

from tests.comfyui_networks.files import U_NET, File, audio, wan

_NEXT_DIT = {"image_model": "lumina2", "patch_size": 2, "in_channels": 16, "cap_feat_dim": 48, "qk_norm": True}
_PREDICT_2 = {
    "max_img_h": 240, "max_img_w": 240, "max_frames": 128, "in_channels": 16, "out_channels": 16, "patch_spatial": 2,
    "patch_temporal": 1, "model_channels": 2048, "concat_padding_mask": True, "crossattn_emb_channels": 1024,
    "pos_emb_cls": "rope3d", "pos_emb_learnable": True, "pos_emb_interpolation": "crop", "min_fps": 1, "max_fps": 30,
    "use_adaln_lora": True, "adaln_lora_dim": 256, "num_blocks": 1, "num_heads": 16,
    "extra_per_block_abs_pos_emb": False,
}  # fmt: skip

LARGE_FILES: dict[str, File] = {
    "wan-humo": File(wan("humo", 36)),
    "wan-animate": File(wan("animate", 36, num_layers=5)),
    "ace-step-15": File({
        "audio_model": "ace1.5", "hidden_size": 256, "intermediate_size": 256, "num_heads": 8,
        "encoder_hidden_size": 2048, "encoder_intermediate_size": 256, "encoder_num_heads": 8, "num_dit_layers": 2,
    }),
    "lumina-2": File({
        **_NEXT_DIT, "dim": 2304, "n_layers": 1, "n_heads": 24, "n_kv_heads": 8, "axes_dims": [32, 32, 32],
        "axes_lens": [300, 512, 512], "rope_theta": 10000.0, "ffn_dim_multiplier": 4.0,
    }),
    "z-image": File({
        **_NEXT_DIT, "dim": 3840, "n_layers": 1, "n_heads": 30, "n_kv_heads": 30, "axes_dims": [32, 48, 48],
        "axes_lens": [1536, 512, 512], "rope_theta": 256.0, "ffn_dim_multiplier": 8 / 3, "z_image_modulation": True,
        "time_scale": 1000.0, "pad_tokens_multiple": 32,
    }),
    "qwen-image": File({"image_model": "qwen_image", "in_channels": 64, "num_layers": 1}),
    "qwen-image-layered": File({
        "image_model": "qwen_image", "in_channels": 64, "num_layers": 1, "use_additional_t_cond": True,
        "default_ref_method": "negative_index",
    }),
    "mage-flow": File({"image_model": "mage_flow", "in_channels": 128, "num_layers": 1}),
    "auraflow": File({"max_seq": 64, "cond_seq_dim": 2048, "n_double_layers": 1, "n_layers": 2}),
    "cosmos-predict-2": File({"image_model": "cosmos_predict2", **_PREDICT_2}),
    "anima": File({"image_model": "anima", **_PREDICT_2}),
    "ideogram-4": File({"image_model": "ideogram4", "in_channels": 128, "num_layers": 1}),
    "chroma": File({
        "image_model": "chroma", "in_channels": 64, "out_channels": 64, "context_in_dim": 48, "hidden_size": 3072,
        "mlp_ratio": 4.0, "num_heads": 24, "depth": 1, "depth_single_blocks": 1, "axes_dim": [16, 56, 56],
        "theta": 10000, "patch_size": 2, "qkv_bias": True, "in_dim": 64, "out_dim": 3072, "hidden_dim": 5120,
        "n_layers": 5, "txt_ids_dims": [], "vec_in_dim": None,
    }),
    "chroma-radiance": File({
        "image_model": "chroma_radiance", "in_channels": 3, "out_channels": 3, "context_in_dim": 48,
        "hidden_size": 3072, "mlp_ratio": 4.0, "num_heads": 24, "depth": 1, "depth_single_blocks": 1,
        "axes_dim": [16, 56, 56], "theta": 10000, "patch_size": 16, "qkv_bias": True, "in_dim": 64, "out_dim": 3072,
        "hidden_dim": 5120, "n_layers": 5, "txt_ids_dims": [], "vec_in_dim": None, "nerf_hidden_size": 64,
        "nerf_mlp_ratio": 4, "nerf_depth": 4, "nerf_max_freqs": 8, "nerf_tile_size": 512,
        "nerf_final_head_type": "conv", "nerf_embedder_dtype": torch.float32, "use_x0": True,
        "use_sequential_txt_ids": False,
    }),
    "boogu": File({
        "image_model": "boogu", "hidden_size": 3360, "num_layers": 1, "num_double_stream_layers": 1,
        "num_refiner_layers": 1, "instruction_feat_dim": 48,
    }),
    "stable-audio": audio(
        "learned", ("seconds_start", "seconds_total"), global_cond_dim=1536, embed_dim=768, io_channels=64, depth=2
    ),
    "sdxl-refiner": File({
        **U_NET, "model_channels": 384, "num_classes": "sequential", "adm_in_channels": 2560, "num_res_blocks": [4, 4],
        "transformer_depth": [0, 0, 4, 4, 4, 4, 0, 0], "transformer_depth_output": [0] * 10, "channel_mult": [1, 1],
        "transformer_depth_middle": -2, "use_linear_in_transformer": True, "context_dim": 1280,
    }),
    "svd": File({
        **U_NET, "in_channels": 8, "num_classes": "sequential", "adm_in_channels": 768, "num_res_blocks": [4, 4],
        "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0], "transformer_depth_output": [0] * 10, "channel_mult": [1, 1],
        "transformer_depth_middle": -2, "use_linear_in_transformer": True, "context_dim": 1024,
        "extra_ff_mix_layer": True, "use_spatial_context": True, "merge_strategy": "learned_with_images",
        "merge_factor": 0.0, "video_kernel_size": [3, 1, 1], "use_temporal_resblock": True,
        "use_temporal_attention": True, "disable_temporal_crossattention": False,
    }),
    "zero123": File(
        {
            **U_NET, "in_channels": 8, "adm_in_channels": None, "num_res_blocks": [1], "transformer_depth": [1],
            "transformer_depth_output": [1, 1], "channel_mult": [1], "transformer_depth_middle": 1,
            "use_linear_in_transformer": False, "context_dim": 768,
        },
        {"cc_projection.weight": (768, 772), "cc_projection.bias": (768,)},
    ),
}  # fmt: skip
"""At most 1.3 GB each, with products in float8."""

TOO_LARGE = {
    "HiDream": "48 blocks of 2560",
    "HiDream O1": "the text model of 8 billion",
    "ACE-Step": "24 blocks of 2560",
    "OmniGen 2": "32 blocks of 2520",
    "ERNIE-Image": "36 blocks of 4096",
    "SeedVR2": "32 blocks of 2560",
    "Mochi": "48 blocks of 3072",
    "MiniMax Music 3": "36 blocks of 2048",
}
"""Families of which ComfyUI recognises the published width and depth alone."""
