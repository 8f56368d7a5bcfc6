"""Where the files of the examples are to be had: what a node's `models` property says, by which ComfyUI offers them."""

from __future__ import annotations

from collections.abc import Mapping

_HUB = "https://huggingface.co/"
_FILES: Mapping[str, tuple[str, str]] = {
    "flux1-dev.safetensors": ("diffusion_models", "Comfy-Org/flux1-dev/resolve/main/flux1-dev.safetensors"),
    "flux1-dev-kontext_fp8_scaled.safetensors": (
        "diffusion_models",
        "Comfy-Org/flux1-kontext-dev_ComfyUI/resolve/main/split_files/diffusion_models/flux1-dev-kontext_fp8_scaled.safetensors",
    ),
    "clip_l.safetensors": ("text_encoders", "comfyanonymous/flux_text_encoders/resolve/main/clip_l.safetensors"),
    "t5xxl_fp16.safetensors": (
        "text_encoders", "comfyanonymous/flux_text_encoders/resolve/main/t5xxl_fp16.safetensors",
    ),
    "ae.safetensors": ("vae", "Comfy-Org/z_image_turbo/resolve/main/split_files/vae/ae.safetensors"),
    "Hyper-FLUX.1-dev-8steps-lora.safetensors": (
        "loras", "ByteDance/Hyper-SD/resolve/main/Hyper-FLUX.1-dev-8steps-lora.safetensors",
    ),
    "qwen_image_edit_2511_fp8mixed.safetensors": (
        "diffusion_models",
        "Comfy-Org/Qwen-Image-Edit_ComfyUI/resolve/main/split_files/diffusion_models/qwen_image_edit_2511_fp8mixed.safetensors",
    ),
    "Qwen-Image-Edit-2511-Lightning-4steps-V1.0-bf16.safetensors": (
        "loras",
        "lightx2v/Qwen-Image-Edit-2511-Lightning/resolve/main/Qwen-Image-Edit-2511-Lightning-4steps-V1.0-bf16.safetensors",
    ),
    "qwen_2.5_vl_7b_fp8_scaled.safetensors": (
        "text_encoders",
        "Comfy-Org/HunyuanVideo_1.5_repackaged/resolve/main/split_files/text_encoders/qwen_2.5_vl_7b_fp8_scaled.safetensors",
    ),
    "qwen_image_vae.safetensors": (
        "vae", "Comfy-Org/Qwen-Image_ComfyUI/resolve/main/split_files/vae/qwen_image_vae.safetensors",
    ),
    "z_image_turbo_bf16.safetensors": (
        "diffusion_models",
        "Comfy-Org/z_image_turbo/resolve/main/split_files/diffusion_models/z_image_turbo_bf16.safetensors",
    ),
    "qwen_3_4b.safetensors": (
        "text_encoders", "Comfy-Org/z_image_turbo/resolve/main/split_files/text_encoders/qwen_3_4b.safetensors",
    ),
    **{
        f"wan2.2_t2v_{noise}_noise_14B_fp8_scaled.safetensors": (
            "diffusion_models",
            "Comfy-Org/Wan_2.2_ComfyUI_Repackaged/resolve/main/split_files/diffusion_models/"
            f"wan2.2_t2v_{noise}_noise_14B_fp8_scaled.safetensors",
        )
        for noise in ("high", "low")
    },
    **{
        f"wan2.2_t2v_lightx2v_4steps_lora_v1.1_{noise}_noise.safetensors": (
            "loras",
            "Comfy-Org/Wan_2.2_ComfyUI_Repackaged/resolve/main/split_files/loras/"
            f"wan2.2_t2v_lightx2v_4steps_lora_v1.1_{noise}_noise.safetensors",
        )
        for noise in ("high", "low")
    },
    "umt5_xxl_fp8_e4m3fn_scaled.safetensors": (
        "text_encoders",
        "Comfy-Org/Wan_2.1_ComfyUI_repackaged/resolve/main/split_files/text_encoders/umt5_xxl_fp8_e4m3fn_scaled.safetensors",
    ),
    "wan_2.1_vae.safetensors": (
        "vae", "Comfy-Org/Wan_2.2_ComfyUI_Repackaged/resolve/main/split_files/vae/wan_2.1_vae.safetensors",
    ),
    "ltx-2-19b-dev-fp8.safetensors": ("checkpoints", "Lightricks/LTX-2/resolve/main/ltx-2-19b-dev-fp8.safetensors"),
    "gemma_3_12B_it_fp4_mixed.safetensors": (
        "text_encoders", "Comfy-Org/ltx-2/resolve/main/split_files/text_encoders/gemma_3_12B_it_fp4_mixed.safetensors",
    ),
    "minimax_h3_fl2va_pruned_int8_convrot.safetensors": (
        "diffusion_models",
        "Comfy-Org/MiniMax-H3/resolve/main/diffusion_models/minimax_h3_fl2va_pruned_int8_convrot.safetensors",
    ),
    "qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors": (
        "text_encoders", "Comfy-Org/MiniMax-H3/resolve/main/text_encoders/qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors",
    ),
    "minimax_h3_video_vae_fp16.safetensors": (
        "vae", "Comfy-Org/MiniMax-H3/resolve/main/vae/minimax_h3_video_vae_fp16.safetensors",
    ),
    "minimax_h3_audio_vae_fp32.safetensors": (
        "vae", "Comfy-Org/MiniMax-H3/resolve/main/vae/minimax_h3_audio_vae_fp32.safetensors",
    ),
    "sd_xl_base_1.0.safetensors": (
        "checkpoints", "stabilityai/stable-diffusion-xl-base-1.0/resolve/main/sd_xl_base_1.0.safetensors",
    ),
}  # fmt: skip
"""Name -> folder below models, and place on the hub, as official templates have them."""


def model_entry(name: str) -> dict[str, str] | None:
    """What a node's `models` property says of a file; None for one that is not to be fetched."""
    found = _FILES.get(name)
    return {"name": name, "url": _HUB + found[1], "directory": found[0]} if found else None
