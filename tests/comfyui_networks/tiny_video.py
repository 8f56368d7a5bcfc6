"""Other networks that make video, tiny."""

from __future__ import annotations

from typing import Any

import torch

from tests.comfyui_networks.tiny import Tiny, build, noise, tiny


@tiny("hunyuan video")
def hunyuan_video() -> Tiny:
    from comfy.ldm.hunyuan_video.model import HunyuanVideo

    network = build(
        HunyuanVideo, image_model="hunyuan_video", in_channels=16, out_channels=16, vec_in_dim=32, context_in_dim=48,
        hidden_size=256, mlp_ratio=4.0, num_heads=2, depth=2, depth_single_blocks=2, axes_dim=[16, 56, 56], theta=256,
        patch_size=[1, 2, 2], qkv_bias=True, guidance_embed=True, byt5=False, meanflow=False,
        use_cond_type_embedding=False, vision_in_dim=None, meanflow_sum=False,
    )  # fmt: skip
    plain = {
        "x": noise(1, 16, 3, 6, 8), "timestep": torch.tensor([700.0]), "context": noise(1, 9, 48), "y": noise(1, 32),
        "guidance": torch.tensor([6.0]),
    }  # fmt: skip
    return Tiny(network, {"plain": plain})


@tiny("minimax h3")
def minimax_h3() -> Tiny:
    from comfy.ldm.minimax.model import MiniMaxH3Model

    network = build(
        MiniMaxH3Model, hidden_size=256, num_layers=3, token_refiner_num_layers=1, num_attention_heads=2,
        attention_head_dim=128, ffn_hidden_size=256, text_dim=48, time_embed_hidden_size=64, time_embed_dim=64,
    )  # fmt: skip
    network.rope.inv_freq.data.copy_(noise(16).abs())
    plain = {
        "x": [noise(1, 24, 3, 6, 8), noise(1, 32, 2, 11)], "timestep": torch.tensor([700.0]),
        "context": noise(1, 9, 48),
    }  # fmt: skip
    return Tiny(network, {"plain": plain})


_HUNYUAN = {
    "in_channels": 16, "out_channels": 16, "vec_in_dim": None, "context_in_dim": 24, "hidden_size": 64,
    "mlp_ratio": 2.0, "num_heads": 2, "depth": 2, "depth_single_blocks": 2, "axes_dim": [8, 12, 12], "theta": 256,
    "patch_size": [1, 2, 2], "qkv_bias": True, "guidance_embed": False, "byt5": False, "meanflow": False,
    "use_cond_type_embedding": False, "vision_in_dim": None, "meanflow_sum": False,
}  # fmt: skip


def _hunyuan(**options: Any) -> Any:
    from comfy.ldm.hunyuan_video.model import HunyuanVideo

    return build(HunyuanVideo, image_model="hunyuan_video", **(_HUNYUAN | options))


@tiny("hunyuan video further inputs")
def hunyuan_video_further_inputs() -> Tiny:
    network = _hunyuan(vec_in_dim=12)
    plain = {
        "x": noise(1, 16, 3, 6, 10), "timestep": torch.tensor([700.0]), "context": noise(1, 9, 24), "y": noise(1, 12),
    }  # fmt: skip
    masked = {"attention_mask": (torch.arange(9)[None] < 5).long()}
    control = {"control": {"input": [noise(1, 45, 64, seed=9) * 0.1], "output": [noise(1, 45, 64, seed=10) * 0.1]}}
    return Tiny(
        network,
        {
            "masked": plain | masked,
            "first frame": plain | {"guiding_frame_index": torch.tensor([0.0])},
            "reference": plain | {"ref_latent": noise(1, 16, 1, 6, 10, seed=8)},
            "control": plain | masked | control,
        },
    )


@tiny("hunyuan video 1.5")
def hunyuan_video_15() -> Tiny:
    network = _hunyuan(byt5=True, use_cond_type_embedding=True, vision_in_dim=20, meanflow=True, meanflow_sum=True)
    both = {"x": noise(2, 16, 3, 6, 10), "timestep": torch.tensor([700.0, 700.0]), "context": noise(2, 9, 24)}
    texts = {"txt_byt5": noise(2, 5, 1472, seed=8), "clip_fea": noise(2, 7, 20, seed=9)}
    sigmas = torch.tensor([1.0, 0.7, 0.0])
    options = {"transformer_options": {"sigmas": sigmas[1:2], "sample_sigmas": sigmas}}
    return Tiny(network, {"plain": both | {"disable_time_r": True}, "all": both | texts | options})


@tiny("hunyuan image")
def hunyuan_image() -> Tiny:
    network = _hunyuan(byt5=True, patch_size=[1, 1], axes_dim=[16, 16], guidance_embed=True)
    plain = {
        "x": noise(2, 16, 5, 7), "timestep": torch.tensor([700.0, 700.0]), "context": noise(2, 9, 24),
        "guidance": torch.tensor([3.5, 3.5]),
    }  # fmt: skip
    return Tiny(network, {"plain": plain, "byt5": plain | {"txt_byt5": noise(2, 5, 1472, seed=8)}})


@tiny("minimax h3 further inputs")
def minimax_h3_further_inputs() -> Tiny:
    from comfy.ldm.minimax.model import DiTBlock, MiniMaxH3Model

    class NewerBlock(DiTBlock):
        """With an argument more."""

        def forward(self, x, t_emb, mod_segments, rope_freqs, transformer_options=None, attention=None):
            assert attention is None
            return super().forward(x, t_emb, mod_segments, rope_freqs, transformer_options=transformer_options or {})

    network = build(
        MiniMaxH3Model, hidden_size=128, num_layers=3, token_refiner_num_layers=1, num_attention_heads=2,
        attention_head_dim=128, ffn_hidden_size=96, text_dim=24, time_embed_hidden_size=32, time_embed_dim=32,
        adaln_curve_grid=5,
    )  # fmt: skip
    for block in network.blocks:
        block.__class__ = NewerBlock
    network.rope.inv_freq.data.copy_(noise(16).abs())
    network.adaln_t_table.data.copy_(noise(5, 32, seed=4))
    plain = {
        "x": [noise(1, 24, 3, 6, 8), noise(1, 32, 2, 11)], "timestep": torch.tensor([700.0]),
        "context": noise(1, 9, 24),
    }  # fmt: skip
    picture, sound = noise(1, 24, 1, 6, 8, seed=8), noise(1, 32, 2, 5, seed=9)
    keyframes = {
        "keyframes": [{"resolved_frame_index": 0, "latent": picture, "audio_latent": sound}],
        "cond_video_latents": [picture], "cond_audio_latents": [sound], "audio_scale": 1.5,
        "text_token_tags": torch.tensor([1, 1, 0, 0, 0, 1, 1, 1, 1]),
    }  # fmt: skip
    references = {
        "refs": [
            {"kind": "image", "latent_h": 4, "latent_w": 6},
            {"kind": "video_audio", "latent_t": 2, "latent_h": 4, "latent_w": 4, "ref_audio_t": 5},
            {"kind": "audio", "ref_audio_t": 3},
        ],
        "cond_video_latents": [noise(1, 24, 1, 4, 6, seed=8), noise(1, 24, 2, 4, 4, seed=9)],
        "cond_audio_latents": [sound, noise(1, 32, 2, 3, seed=10)],
        "visual_cond_noise_aug": 0.9, "seed": 3,
    }  # fmt: skip
    mask = torch.ones(1, 1, 3, 6, 8)
    mask[:, :, 0], mask[:, :, 1, :2] = 0.0, 0.5
    sound_mask = torch.linspace(0, 1, 22).reshape(1, 1, 2, 11)
    return Tiny(
        network,
        {
            "keyframes": plain | {"minimax_payload": keyframes},
            "references": plain | {"minimax_payload": references},
            "masks": plain | {"denoise_mask": mask, "audio_denoise_mask": sound_mask},
        },
    )


@tiny("kandinsky 5")
def kandinsky_5() -> Tiny:
    from comfy.ldm.kandinsky5.model import Kandinsky5

    network = build(
        Kandinsky5, in_text_dim=24, in_text_dim2=12, time_dim=16, model_dim=64, ff_dim=96, visual_embed_dim=132,
        num_text_blocks=1, num_visual_blocks=3, axes_dims=(8, 12, 12),
    )  # fmt: skip
    both = {
        "x": noise(2, 33, 3, 6, 10), "timestep": torch.tensor([700.0, 700.0]), "context": noise(2, 9, 24),
        "y": noise(2, 12),
    }  # fmt: skip
    return Tiny(network, {"video": both, "first frame": both | {"time_dim_replace": noise(2, 16, 1, 6, 10, seed=8)}})


def _predict_2() -> Any:
    from comfy.ldm.cosmos.predict2 import MiniTrainDIT

    return build(
        MiniTrainDIT, max_img_h=32, max_img_w=32, max_frames=8, in_channels=16, out_channels=16, patch_spatial=2,
        patch_temporal=1, model_channels=48, num_blocks=3, num_heads=2, crossattn_emb_channels=24,
        pos_emb_cls="rope3d", use_adaln_lora=True, adaln_lora_dim=8, extra_per_block_abs_pos_emb=True,
    )  # fmt: skip


@tiny("cosmos-predict 2")
def cosmos_predict_2() -> Tiny:
    both = {"x": noise(2, 16, 3, 6, 10), "timestep": torch.tensor([0.7, 0.7]), "context": noise(2, 9, 24)}
    by_frame = {"timestep": torch.tensor([[0.0, 0.7, 0.7]] * 2)}
    return Tiny(_predict_2(), {"plain": both, "by frame": both | by_frame | {"fps": torch.tensor([16.0])}})


@tiny("cosmos 1")
def cosmos_1() -> Tiny:
    from comfy.ldm.cosmos.model import GeneralDIT

    network = build(
        GeneralDIT, max_img_h=32, max_img_w=32, max_frames=8, in_channels=17, out_channels=16, patch_spatial=2,
        patch_temporal=1, model_channels=48, num_blocks=3, num_heads=2, crossattn_emb_channels=24,
        pos_emb_cls="rope3d", use_adaln_lora=True, adaln_lora_dim=8, extra_per_block_abs_pos_emb=True,
        extra_per_block_abs_pos_emb_type="learnable", affline_emb_norm=True, block_x_format="THWBD",
    )  # fmt: skip
    both = {"x": noise(2, 17, 3, 6, 10), "timestep": torch.tensor([0.7, 0.7]), "context": noise(2, 9, 24)}
    return Tiny(network, {"plain": both, "padding": both | {"padding_mask": torch.zeros(2, 1, 6, 10)}})


@tiny("cogvideox")
def cogvideox() -> Tiny:
    from comfy.ldm.cogvideo.model import CogVideoXTransformer3DModel

    network = build(
        CogVideoXTransformer3DModel, num_attention_heads=2, attention_head_dim=32, in_channels=16, out_channels=16,
        time_embed_dim=16, ofs_embed_dim=16, text_embed_dim=24, num_layers=3, sample_width=10, sample_height=6,
        sample_frames=9, patch_size_t=2, use_rotary_positional_embeddings=True, max_text_seq_length=9,
    )  # fmt: skip
    both = {"x": noise(2, 16, 3, 6, 10), "timestep": torch.tensor([700.0, 700.0]), "context": noise(2, 9, 24)}
    return Tiny(network, {"plain": both, "offset": both | {"ofs": torch.tensor([2.0, 2.0])}})
