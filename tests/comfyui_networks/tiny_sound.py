"""Networks that make music and shapes, tiny."""

from __future__ import annotations

from typing import Any

import torch

from tests.comfyui_networks.tiny import Tiny, build, fill, noise, tiny


@tiny("ace-step 1.5")
def ace_step_15() -> Tiny:
    from comfy.ldm.ace.ace_step15 import AceStepConditionGenerationModel

    network = build(
        AceStepConditionGenerationModel, in_channels=24, hidden_size=64, text_hidden_dim=24, timbre_hidden_dim=8,
        audio_acoustic_hidden_dim=8, num_dit_layers=4, num_lyric_layers=1, num_timbre_layers=1,
        num_tokenizer_layers=1, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96, sliding_window=5,
        fsq_dim=32, encoder_hidden_size=32, encoder_intermediate_size=48, encoder_num_heads=4,
    )  # fmt: skip
    both = {
        "x": noise(2, 8, 45), "timestep": torch.tensor([0.7, 0.7]), "context": noise(2, 9, 24),
        "lyric_embed": noise(2, 7, 24, seed=8), "refer_audio": noise(2, 8, 45, seed=9),
    }  # fmt: skip
    return Tiny(network, {"cover": both, "song": both | {"is_covers": False}})


def _stable_audio(**more: Any) -> Any:
    from comfy.ldm.audio.dit import AudioDiffusionTransformer

    network = build(
        AudioDiffusionTransformer, io_channels=8, embed_dim=64, cond_token_dim=32, global_cond_dim=16, depth=3,
        num_heads=2, **more,
    )  # fmt: skip
    network.transformer.rotary_pos_emb.inv_freq.copy_(noise(16, seed=4).abs())
    return network


@tiny("stable audio")
def stable_audio() -> Tiny:
    both = {
        "x": noise(2, 8, 37), "timestep": torch.tensor([0.7, 0.7]), "context": noise(2, 5, 32),
        "global_embed": noise(2, 16),
    }  # fmt: skip
    return Tiny(_stable_audio(), {"plain": both})


@tiny("stable audio 3")
def stable_audio_3() -> Tiny:
    network = _stable_audio(
        global_cond_type="adaLN", global_cond_shared_embed=True, local_add_cond_dim=9, num_memory_tokens=4,
        timestep_features_type="expo", norm_type="rms_norm", attn_kwargs={"qk_norm": "rms", "differential": True},
    )  # fmt: skip
    both = {
        "x": noise(2, 8, 37), "timestep": torch.tensor([0.7, 0.7]), "context": noise(2, 5, 32),
        "global_embed": noise(2, 16),
    }  # fmt: skip
    return Tiny(
        network, {"plain": both, "inpainting": both | {"local_add_cond": noise(2, 9, 37, seed=8)}}, ("inpainting",)
    )


@tiny("minimax music")
def minimax_music() -> Tiny:
    from comfy.ldm.minimax_music import dit
    from comfy.ops import disable_weight_init as operations

    # All its widths are fixed, and 36 layers: made without memory, and then of narrow parts.
    network = build(dit.MiniMaxMusic3DiT, device="meta")
    network.latent_conditioners[0] = operations.Conv1d(4096, 16, kernel_size=3, padding=1)
    flow = network.diffusion_transformer
    flow.preprocess_conv = operations.Conv1d(272, 272, 1, bias=False)
    flow.to_timestep_embed = torch.nn.Sequential(operations.Linear(256, 64), torch.nn.SiLU(), operations.Linear(64, 64))
    inner = flow.transformer
    inner.project_in, inner.project_out = operations.Linear(272, 64, bias=False), operations.Linear(64, 128, bias=False)
    inner.layers = torch.nn.ModuleList(build(dit.TransformerBlock, 64, 32, 96) for _ in range(3))
    fill(network.to_empty(device="cpu"))
    inner.rotary_pos_emb.inv_freq.copy_(noise(16).abs())
    for layer in inner.layers:
        layer.pre_norm.beta.zero_()
        layer.ff_norm.beta.zero_()
    both = {
        "timestep": torch.tensor([0.7, 0.7]), "context": noise(2, 9, 8 * 4096),
        "conditioning_scale": torch.tensor([1.0, 0.0]).reshape(2, 1, 1),
    }  # fmt: skip
    return Tiny(network, {"plain": both | {"x": noise(2, 128, 37)}, "in windows": both | {"x": noise(2, 128, 700)}})


@tiny("hunyuan3d 2")
def hunyuan3d_2() -> Tiny:
    from comfy.ldm.hunyuan3d.model import Hunyuan3Dv2

    network = build(
        Hunyuan3Dv2, in_channels=8, context_in_dim=24, hidden_size=64, mlp_ratio=2.0, num_heads=2, depth=2,
        depth_single_blocks=2, guidance_embed=True,
    )  # fmt: skip
    both = {
        "x": noise(2, 8, 37), "timestep": torch.tensor([0.7, 0.7]), "context": noise(2, 9, 24),
        "guidance": torch.tensor([5.0, 5.0]),
    }  # fmt: skip
    return Tiny(network, {"plain": both})


@tiny("hunyuan3d 2.1")
def hunyuan3d_21() -> Tiny:
    from comfy.ldm.hunyuan3dv2_1.hunyuandit import HunYuanDiTPlain

    network = build(
        HunYuanDiTPlain, in_channels=8, hidden_size=64, context_dim=24, depth=5, num_heads=2, num_moe_layers=2,
        num_experts=4,
    )  # fmt: skip
    both = {"x": noise(2, 8, 37), "timestep": torch.tensor([0.7, 0.7]), "context": noise(2, 9, 24)}
    return Tiny(network, {"plain": both})


@tiny("triposplat")
def triposplat() -> Tiny:
    from comfy.ldm.triposplat.model import LatentSeqMMFlowModel

    network = build(
        LatentSeqMMFlowModel, q_token_length=37, model_channels=64, cond_channels=24, num_blocks=3,
        num_head_channels=32, cond2_channels=12, mlp_ratio=2,
    )  # fmt: skip
    both = {
        "x": [noise(2, 37, 16), noise(2, 1, 5)], "timestep": torch.tensor([0.7, 0.7]), "context": noise(2, 15, 24),
    }  # fmt: skip
    return Tiny(network, {"plain": both, "references": both | {"ref_latents": [noise(2, 12, 3, 4, seed=8)]}})
