"""Says in words what a file is that no model of ours describes, by telltale keys."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..errors import UnsupportedModelError
from ..networks.diffusers.registry import supported
from ..said import Said, said

_TELLTALES: tuple[tuple[Said, str], ...] = (
    (said("a LoRA"), r"lora_(A|B|up|down)|\.lora\.|lokr_w|hada_w|dora_scale|\.oft_blocks"),
    (said("a ControlNet"), r"^(control_model|controlnet)|controlnet_(blocks|x_embedder|cond_embedding|mode_embed)"),
    (said("a Chroma transformer"), r"^distilled_guidance_layer\."),
    (said("a transformer in FLUX.2's key style that is not FLUX.2"), r"^double_stream_modulation_img\."),
    (said("a HunyuanVideo transformer"), r"^(txt_in\.individual_token_refiner|context_embedder\.token_refiner)\."),
    (said("a transformer in SD3's key style that is not SD3 or SD3.5"), r"^joint_blocks\.0\."),
    (said("an AuraFlow transformer"), r"^(double_layers|joint_transformer_blocks)\.0\."),
    (said("a Qwen-Image transformer"), r"^transformer_blocks\.0\.img_mod\.1\."),
    (said("a transformer in HunyuanDiT's key style that is not HunyuanDiT"), r"^(mlp_t5\.0|time_extra_emb\.pooler)\."),
    (said("a Wan VACE transformer"), r"^vace_(blocks|patch_embedding)\."),
    (said("a Wan camera control transformer"), r"^control_adapter\.conv\."),
    (said("a Wan speech-to-video transformer"), r"^casual_audio_encoder\."),
    (said("a Wan HuMo transformer"), r"^audio_proj\.audio_proj_glob_1\."),
    (said("a Wan Animate transformer"), r"^(face_adapter|pose_patch_embedding)\."),
    (said("a Wan SCAIL transformer"), r"^patch_embedding_(mask|pose)\."),
    (said("a WanDancer transformer"), r"^patch_embedding_global\."),
    (said("a Wan transformer with a reference image"), r"^ref_conv\."),
    (said("a Wan transformer with additions of its own"), r"^blocks\.0\.(self_attn\.norm_q|attn1\.norm_q)\."),
    (said("an LTX-Video transformer"), r"^patchify_proj\."),
    (said("a Lumina 2 or Z-Image transformer"), r"^(cap_embedder|noise_refiner|context_refiner)\."),
    (said("a Mochi transformer"), r"^t5_y(_embedder|proj)\."),
    (said("a HiDream transformer"), r"^double_stream_blocks\.0\."),
    (said("a Cosmos transformer"), r"^(net\.)?(blocks\.block0|x_embedder\.proj\.1)\."),
    (said("a Sana transformer"), r"^(blocks\.0\.mlp\.inverted_conv|transformer_blocks\.0\.ff\.conv_inverted)\."),
    (said("a Latte transformer"), r"^temporal_transformer_blocks\."),
    (
        said("a transformer in PixArt's key style that is not PixArt-α or PixArt-Σ"),
        r"^(t_block|adaln_single\.linear|y_embedder\.y_embedding)",
    ),
    (said("a CogVideoX transformer"), r"^patch_embed\.text_proj\."),
    (said("a Stable Video Diffusion U-Net"), r"\.(time_stack|time_mix_blocks)\."),
    (said("a Kolors U-Net"), r"^encoder_hid_proj\."),
    (said("an SDXL U-Net with a noise range of its own (EDM)"), r"^edm_vpred\."),
    (said("a U-Net in SDXL's key style that is not SDXL"), r"^(label_emb\.0|add_embedding\.linear_1)\."),
    (said("a Stable Diffusion 1 or 2 U-Net"), r"^(input_blocks\.0\.0|down_blocks\.0\.(attentions|resnets)\.0)\."),
    (said("a transformer in FLUX's key style that is not FLUX.1"), r"^double_blocks\.0\.img_attn\."),
    (said("a transformer in FLUX's diffusers names that is not FLUX.1"), r"^single_transformer_blocks\.0\."),
    (said("a VAE"), r"^(first_stage_model\.|vae\.)?(encoder|decoder)\.(conv_in|conv1|conv_out|downsamples)\."),
    (said("a CLIP text encoder"), r"(text_model\.encoder|transformer\.resblocks)"),
    (said("a CLIP vision encoder"), r"vision_model\.encoder"),
    (said("a T5 text encoder"), r"encoder\.block\.0\.layer\.0\.SelfAttention\."),
    (said("a language model"), r"model\.layers\.0\.self_attn\."),
)
"""What it is, and an expression that finds it in a key (prefix taken off). The first one that is found counts."""


def name_contents(keys: Iterable[str]) -> Said:
    """Describe a file by its keys, such as "a VAE", else by the first few keys."""
    keys = sorted(keys)
    for what, telltale in _TELLTALES:
        if any(re.search(telltale, key) for key in keys):
            return what
    if not keys:
        return said("a file without tensors")
    names = ", ".join(keys[:4])
    return said("something unknown, with {count} tensors such as {names}", count=len(keys), names=names)


def unsupported(path: object, what: str) -> UnsupportedModelError:
    """The error for a sound file that is no transformer of ours."""
    return UnsupportedModelError(
        said("{path} is {what}, not a supported diffusion transformer.", path=path, what=what),
        said("Choose another file. {supported}", supported=supported()),
    )
