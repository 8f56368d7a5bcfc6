"""Networks that make pictures out of one stream, or with text beside it, tiny."""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock

import torch

from tests.comfyui_networks.tiny import Tiny, build, noise, tiny


@tiny("z-image")
def z_image(heads: int = 9) -> Tiny:
    from comfy.ldm.lumina.model import NextDiT

    network = build(
        NextDiT, patch_size=2, in_channels=16, dim=128 * heads, n_layers=2, n_refiner_layers=2, n_heads=heads,
        n_kv_heads=heads, ffn_dim_multiplier=8 / 3, qk_norm=True, cap_feat_dim=48, axes_dims=[32, 48, 48],
        axes_lens=[1536, 512, 512], rope_theta=256.0, z_image_modulation=True, time_scale=1000.0,
        pad_tokens_multiple=32,
    )  # fmt: skip
    plain = {
        "x": noise(1, 16, 16, 20), "timestep": torch.tensor([0.7]), "context": noise(1, 40, 48), "num_tokens": 40,
    }  # fmt: skip
    return Tiny(network, {"plain": plain})


@tiny("lumina 2")
def lumina_2() -> Tiny:
    from comfy.ldm.lumina.model import NextDiT

    network = build(
        NextDiT, patch_size=2, in_channels=16, dim=288, n_layers=2, n_refiner_layers=2, n_heads=3, n_kv_heads=1,
        ffn_dim_multiplier=4.0, qk_norm=True, cap_feat_dim=48, axes_dims=[32, 32, 32], axes_lens=[300, 512, 512],
        rope_theta=10000.0,
    )  # fmt: skip
    both = {
        "x": noise(2, 16, 8, 12), "timestep": torch.tensor([0.7, 0.7]), "context": noise(2, 9, 48), "num_tokens": 9,
    }  # fmt: skip
    return Tiny(network, {"plain": both})


@tiny("krea 2")
def krea_2() -> Tiny:
    from comfy.ldm.krea2.model import SingleStreamDiT

    network = build(
        SingleStreamDiT, features=256, tdim=64, txtdim=64, heads=2, kvheads=1, layers=3, txtlayers=2, txtheads=1,
        txtkvheads=1, multiplier=2,
    )  # fmt: skip
    both = {"x": noise(2, 16, 10, 14), "timestep": torch.tensor([0.7, 0.7]), "context": noise(2, 9, 128)}
    references = {"ref_latents": [noise(2, 16, 6, 6, seed=8)], "ref_latents_method": "index_timestep_zero"}
    return Tiny(network, {"plain": both, "references at 0": both | references})


def _next_dit(name: str, **more: Any) -> Any:
    module = importlib.import_module("comfy.ldm.lumina.model")
    return build(
        getattr(module, name), patch_size=2, n_layers=2, n_refiner_layers=2, dim=288, n_heads=3, n_kv_heads=3,
        ffn_dim_multiplier=1.0, qk_norm=True, cap_feat_dim=24, axes_dims=[32, 32, 32], axes_lens=[300, 512, 512],
        rope_theta=256.0, z_image_modulation=True, time_scale=1000.0, pad_tokens_multiple=4, **more,
    )  # fmt: skip


@tiny("z-image omni")
def z_image_omni() -> Tiny:
    network = _next_dit("NextDiT", in_channels=16, siglip_feat_dim=20)
    both = {
        "x": noise(2, 16, 8, 12), "timestep": torch.tensor([0.7, 0.7]), "context": noise(1, 9, 24), "num_tokens": 9,
    }  # fmt: skip
    omni = {
        "ref_latents": [noise(1, 16, 6, 6, seed=8), noise(1, 16, 4, 8, seed=9)],
        "ref_contexts": [noise(1, 5, 24, seed=10), noise(1, 7, 24, seed=11)],
    }
    siglip = {"siglip_feats": [noise(1, 3, 4, 20, seed=13), noise(1, 2, 2, 20, seed=14)]}
    one = both | {"x": noise(1, 16, 8, 12), "timestep": torch.tensor([0.7])}
    more = {"ref_contexts": [*omni["ref_contexts"], noise(1, 3, 24, seed=12)]}
    return Tiny(network, {"plain": both, "omni": both | omni, "siglip": one | omni | siglip | more})


@tiny("z-image pixels")
def z_image_pixels() -> Tiny:
    network = _next_dit("NextDiTPixelSpace", in_channels=3, decoder_hidden_size=16, decoder_num_res_blocks=1)
    plain = {"x": noise(1, 3, 10, 12), "timestep": torch.tensor([0.7]), "context": noise(1, 9, 24), "num_tokens": 9}
    return Tiny(network, {"plain": plain})


def _omnigen(module: str, name: str, **more: Any) -> Tiny:
    network = build(
        getattr(importlib.import_module(module), name), patch_size=2, in_channels=16, hidden_size=96, num_layers=2,
        num_refiner_layers=2, num_attention_heads=4, num_kv_heads=2, multiple_of=16, axes_dim_rope=(8, 8, 8), **more,
    )  # fmt: skip
    both = {
        "x": noise(2, 16, 6, 10), "timestep": torch.tensor([0.7, 0.7]), "context": noise(2, 9, 24), "num_tokens": 9,
    }  # fmt: skip
    references = {"ref_latents": [noise(2, 16, 4, 6, seed=8), noise(2, 16, 6, 6, seed=9)]}
    return Tiny(network, {"plain": both, "references": both | references})


@tiny("omnigen 2")
def omnigen_2() -> Tiny:
    return _omnigen("comfy.ldm.omnigen.omnigen2", "OmniGen2Transformer2DModel", text_feat_dim=24)


@tiny("boogu")
def boogu() -> Tiny:
    return _omnigen(
        "comfy.ldm.boogu.model", "BooguTransformer2DModel", instruction_feat_dim=24, num_double_stream_layers=2
    )


@tiny("ideogram 4")
def ideogram_4() -> Tiny:
    from comfy.ldm.ideogram4.model import Ideogram4Transformer2DModel

    network = build(
        Ideogram4Transformer2DModel, in_channels=16, num_layers=2, num_attention_heads=2, attention_head_dim=32,
        intermediate_size=64, adaln_dim=16, llm_features_dim=24, mrope_section=(8, 4, 4),
    )  # fmt: skip
    both = {"x": noise(2, 16, 5, 7), "timestep": torch.tensor([0.7, 0.7])}
    text = {"context": noise(2, 9, 24)}
    masked = {"attention_mask": (torch.arange(9)[None] < torch.tensor([[9], [5]])).long()}
    return Tiny(network, {"without text": both, "text": both | text, "masked": both | text | masked})


@tiny("ernie-image")
def ernie_image() -> Tiny:
    from comfy.ldm.ernie.model import ErnieImageModel

    network = build(
        ErnieImageModel, hidden_size=64, num_attention_heads=2, num_layers=2, ffn_hidden_size=96, in_channels=16,
        out_channels=16, text_in_dim=24, rope_axes_dim=(8, 12, 12),
    )  # fmt: skip
    plain = {"x": noise(2, 16, 5, 7), "timestep": torch.tensor([700.0, 700.0]), "context": noise(2, 9, 24)}
    return Tiny(network, {"plain": plain})


@tiny("pixart")
def pixart() -> Tiny:
    from comfy.ldm.pixart.pixartms import PixArtMS

    network = build(
        PixArtMS, input_size=8, in_channels=4, hidden_size=96, depth=3, num_heads=2, caption_channels=24,
        model_max_length=9, micro_condition=True,
    )  # fmt: skip
    both = {"x": noise(2, 4, 30, 38), "timestep": torch.tensor([700.0, 700.0]), "context": noise(2, 9, 24)}
    sizes = {"c_size": torch.tensor([[240.0, 304.0]] * 2), "c_ar": torch.tensor([[0.8]] * 2)}
    return Tiny(network, {"plain": both, "sizes": both | sizes})


@tiny("hunyuandit")
def hunyuandit() -> Tiny:
    from comfy.ldm.hydit.models import HunYuanDiT

    network = build(
        HunYuanDiT, input_size=8, in_channels=4, hidden_size=64, depth=4, num_heads=2, text_states_dim=24,
        text_states_dim_t5=16, text_len=5, text_len_t5=7, size_cond=True, use_style_cond=True,
    )  # fmt: skip
    both = {
        "x": noise(2, 4, 6, 10), "timestep": torch.tensor([700.0, 700.0]), "context": noise(2, 5, 24),
        "text_embedding_mask": torch.ones(2, 5), "encoder_hidden_states_t5": noise(2, 7, 16),
        "text_embedding_mask_t5": torch.tensor([[1.0] * 7, [1.0] * 4 + [0.0] * 3]), "image_meta_size": noise(2, 6),
    }  # fmt: skip
    return Tiny(network, {"plain": both, "control": both | {"control": {"output": [noise(2, 15, 64, seed=9) * 0.1]}}})


def _predict_2(network: Any, **more: Any) -> Any:
    options = {
        "max_img_h": 32, "max_img_w": 32, "max_frames": 8, "in_channels": 16, "out_channels": 16, "patch_spatial": 2,
        "patch_temporal": 1, "model_channels": 48, "num_blocks": 3, "num_heads": 2, "crossattn_emb_channels": 24,
        "pos_emb_cls": "rope3d", "use_adaln_lora": True, "adaln_lora_dim": 8,
    }  # fmt: skip
    return build(network, **(options | more))


@tiny("anima")
def anima() -> Tiny:
    from comfy.ldm.anima import model

    # The adapter of texts has 135 million parameters, and is outside of blocks.
    with mock.patch.object(model, "LLMAdapter", return_value=torch.nn.Identity()):
        network = _predict_2(model.Anima)
    both = {"x": noise(2, 16, 1, 6, 10), "timestep": torch.tensor([0.7, 0.7]), "context": noise(2, 9, 24)}
    return Tiny(network, {"plain": both, "padding": both | {"padding_mask": torch.zeros(2, 1, 6, 10)}})


@tiny("hidream o1")
def hidream_o1() -> Tiny:
    from comfy.ldm.hidream_o1.model import HiDreamO1Transformer

    text = {
        "vocab_size": 20, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rope_dims": [4, 2, 2],
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "depth": 1, "num_position_embeddings": 16,
        "deepstack_visual_indexes": (),
    }  # fmt: skip
    network = build(HiDreamO1Transformer, text_config_overrides=text, vision_config_overrides=vision)
    both = {
        "x": noise(2, 3, 96, 160), "timestep": torch.tensor([700.0, 700.0]), "ar_len": 7,
        "input_ids": torch.arange(14).reshape(2, 7) % 9, "position_ids": torch.arange(22).expand(1, 3, 22),
    }  # fmt: skip
    # Ranks come to the first after one that kept its text; nothing is kept in the second.
    return Tiny(network, {"kept": both, "not kept": both | {"ar_len": 0}}, whole=("not kept",))
