"""Networks that make pictures out of a stream of text and one of the picture, tiny."""

from __future__ import annotations

from typing import Any

import torch

from tests.comfyui_networks.tiny import Tiny, build, noise, tiny


@tiny("flux")
def flux() -> Tiny:
    from comfy.ldm.flux.model import Flux

    network = build(
        Flux, image_model="flux", in_channels=16, out_channels=16, vec_in_dim=32, context_in_dim=48, hidden_size=256,
        mlp_ratio=4.0, num_heads=2, depth=2, depth_single_blocks=2, axes_dim=[16, 56, 56], theta=10000, patch_size=2,
        qkv_bias=True, guidance_embed=True, txt_ids_dims=[],
    )  # fmt: skip
    both = {
        "x": noise(2, 16, 14, 18), "timestep": torch.tensor([0.7, 0.7]), "context": noise(2, 11, 48),
        "y": noise(2, 32), "guidance": torch.tensor([3.5, 3.5]),
    }  # fmt: skip
    control = {"input": [noise(2, 63, 256, seed=9) * 0.1], "output": [noise(2, 63, 256, seed=10) * 0.1]}
    return Tiny(
        network,
        {
            "plain": both,
            "references": both | {"ref_latents": [noise(2, 16, 8, 10, seed=8)]},
            "control": both | {"control": control},
            "bias": both | {"attention_mask": noise(2, 1, 74, 74, seed=3)},
        },
    )


@tiny("flux2")
def flux2() -> Tiny:
    from comfy.ldm.flux.model import Flux

    network = build(
        Flux, image_model="flux2", in_channels=128, out_channels=128, vec_in_dim=None, context_in_dim=48,
        hidden_size=256, mlp_ratio=3.0, num_heads=2, depth=2, depth_single_blocks=2, axes_dim=[32] * 4, theta=2000,
        patch_size=1, qkv_bias=False, guidance_embed=True, txt_ids_dims=[3], global_modulation=True, mlp_silu_act=True,
        ops_bias=False, default_ref_method="index", ref_index_scale=10.0,
    )  # fmt: skip
    plain = {
        "x": noise(1, 128, 7, 9), "timestep": torch.tensor([0.7]), "context": noise(1, 9, 48),
        "guidance": torch.tensor([3.5]),
    }  # fmt: skip
    references = plain | {"ref_latents": [noise(1, 128, 4, 5, seed=8)]}
    at_zero = references | {"ref_latents_method": "index_timestep_zero"}
    return Tiny(network, {"plain": plain, "references": references, "references at 0": at_zero})


@tiny("qwen-image")
def qwen_image() -> Tiny:
    from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel

    network = build(
        QwenImageTransformer2DModel, patch_size=2, in_channels=64, out_channels=16, num_layers=3,
        attention_head_dim=128, num_attention_heads=2, joint_attention_dim=48,
    )  # fmt: skip
    both = {"x": noise(2, 16, 1, 8, 12), "timestep": torch.tensor([0.7, 0.7]), "context": noise(2, 9, 48)}
    references = {"ref_latents": [noise(2, 16, 1, 4, 6, seed=9)]}
    return Tiny(
        network,
        {
            "plain": both,
            "references": both | references,
            "references at 0": both | references | {"ref_latents_method": "index_timestep_zero"},
            "masked text": both | {"attention_mask": (torch.arange(9)[None] < torch.tensor([[9], [5]])).long()},
            "control": both | {"control": {"input": [noise(2, 24, 256, seed=3) * 0.1]}},
        },
    )


@tiny("qwen-image layered")
def qwen_image_layered() -> Tiny:
    from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel

    network = build(
        QwenImageTransformer2DModel, patch_size=2, in_channels=64, out_channels=16, num_layers=2,
        attention_head_dim=128, num_attention_heads=1, joint_attention_dim=24, use_additional_t_cond=True,
        default_ref_method="negative_index",
    )  # fmt: skip
    layers = {
        "x": noise(1, 16, 3, 6, 10), "timestep": torch.tensor([0.7]), "context": noise(1, 9, 24),
        "additional_t_cond": torch.tensor([0]),
    }  # fmt: skip
    return Tiny(network, {"references": layers | {"ref_latents": [noise(1, 16, 1, 6, 10, seed=9)]}})


@tiny("mage-flow")
def mage_flow() -> Tiny:
    from comfy.ldm.mage_flow.model import MageFlowTransformer2DModel

    network = build(
        MageFlowTransformer2DModel, in_channels=16, out_channels=16, num_layers=2, attention_head_dim=128,
        num_attention_heads=1, joint_attention_dim=24,
    )  # fmt: skip
    both = {"x": noise(2, 16, 5, 7), "timestep": torch.tensor([0.7, 0.7]), "context": noise(2, 9, 24)}
    references = {"ref_latents": [noise(2, 16, 3, 4, seed=9)]}
    masked = {"attention_mask": (torch.arange(9)[None] < torch.tensor([[9], [5]])).long()}
    control = {"control": {"input": [noise(2, 35, 128, seed=3) * 0.1]}}
    return Tiny(network, {"plain": both, "references": both | references | control, "masked": both | masked})


_CHROMA = {
    "context_in_dim": 24, "hidden_size": 64, "mlp_ratio": 2.0, "num_heads": 2, "depth": 2,
    "depth_single_blocks": 2, "axes_dim": [8, 12, 12], "theta": 10000, "qkv_bias": True, "in_dim": 64, "out_dim": 64,
    "hidden_dim": 32, "n_layers": 1, "txt_ids_dims": [], "vec_in_dim": 0,
}  # fmt: skip


def _mean_of_keys(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pe: Any, **_: Any) -> dict[str, Any]:
    """A patch inside of blocks that mixes all tokens."""
    return {"q": q, "k": k - k.mean(2, keepdim=True), "v": v, "pe": pe}


@tiny("chroma")
def chroma() -> Tiny:
    from comfy.ldm.chroma.model import Chroma

    network = build(Chroma, **_CHROMA, in_channels=64, out_channels=64, patch_size=2)
    both = {
        "x": noise(2, 16, 6, 10), "timestep": torch.tensor([0.7, 0.7]), "context": noise(2, 9, 24),
        "guidance": torch.tensor([0.0, 0.0]),
    }  # fmt: skip
    control = {"control": {"input": [noise(2, 15, 64, seed=9) * 0.1], "output": [noise(2, 15, 64, seed=10) * 0.1]}}
    bias = {"attention_mask": noise(2, 1, 24, 24, seed=3)}
    patch = {"transformer_options": {"patches": {"attn1_patch": [_mean_of_keys]}}}
    calls = {"plain": both, "control": both | control, "bias": both | bias, "patched": both | patch}
    return Tiny(network, calls, whole=("patched",))


@tiny("chroma radiance")
def chroma_radiance() -> Tiny:
    from comfy.ldm.chroma_radiance.model import ChromaRadiance

    network = build(
        ChromaRadiance, **_CHROMA, in_channels=3, out_channels=3, patch_size=4, nerf_hidden_size=8, nerf_mlp_ratio=2,
        nerf_depth=1, nerf_max_freqs=4, nerf_tile_size=0, nerf_final_head_type="conv", nerf_embedder_dtype=None,
        use_x0=True, use_sequential_txt_ids=True,
    )  # fmt: skip
    plain = {
        "x": noise(1, 3, 16, 24), "timestep": torch.tensor([0.7]), "context": noise(1, 9, 24),
        "guidance": torch.tensor([0.0]),
    }  # fmt: skip
    return Tiny(network, {"plain": plain})


@tiny("hidream")
def hidream() -> Tiny:
    from comfy.ldm.hidream.model import HiDreamImageTransformer2DModel

    network = build(
        HiDreamImageTransformer2DModel, patch_size=2, in_channels=16, out_channels=16, num_layers=2,
        num_single_layers=2, attention_head_dim=32, num_attention_heads=2, caption_channels=[20, 24], text_emb_dim=12,
        axes_dims_rope=(16, 8, 8), max_resolution=(32, 32), llama_layers=[0, 1, 2, 1],
    )  # fmt: skip
    both = {
        "x": noise(2, 16, 6, 10), "timestep": torch.tensor([700.0, 700.0]), "y": noise(2, 12),
        "context": noise(2, 5, 20), "encoder_hidden_states_llama3": noise(2, 3, 7, 24),
    }  # fmt: skip
    return Tiny(network, {"plain": both, "edit": both | {"image_cond": noise(2, 16, 6, 10, seed=9)}})


@tiny("joyimage")
def joyimage() -> Tiny:
    from comfy.ldm.joyimage.model import JoyImageTransformer3DModel

    network = build(
        JoyImageTransformer3DModel, hidden_size=64, num_attention_heads=2, text_dim=24, num_layers=2,
        rope_dim_list=[8, 12, 12],
    )  # fmt: skip
    plain = {"x": noise(2, 16, 1, 6, 10), "timestep": torch.tensor([700.0, 700.0]), "context": noise(2, 9, 24)}
    return Tiny(network, {"plain": plain, "references": plain | {"ref_latents": [noise(2, 16, 1, 4, 6, seed=8)]}})


@tiny("lens")
def lens() -> Tiny:
    from comfy.ldm.lens.model import LensTransformer2DModel

    network = build(
        LensTransformer2DModel, patch_size=1, in_channels=16, out_channels=16, num_layers=2, attention_head_dim=32,
        num_attention_heads=2, enc_hidden_dim=12, axes_dims_rope=(8, 12, 12), selected_layer_index=(1, 2),
    )  # fmt: skip
    both = {"x": noise(2, 16, 5, 7), "timestep": torch.tensor([0.7, 0.7]), "context": noise(2, 9, 24)}
    masked = {"attention_mask": torch.arange(9)[None] < torch.tensor([[9], [5]])}
    control = {"control": {"input": [noise(2, 35, 64, seed=3) * 0.1]}}
    return Tiny(network, {"plain": both, "masked": both | masked, "control": both | control})


def _sd3(**more: Any) -> Tiny:
    from comfy.ldm.modules.diffusionmodules.mmdit import OpenAISignatureMMDITWrapper

    network = build(
        OpenAISignatureMMDITWrapper, input_size=None, patch_size=2, in_channels=16, depth=2, adm_in_channels=12,
        context_embedder_config={"target": "torch.nn.Linear", "params": {"in_features": 24, "out_features": 128}},
        pos_embed_max_size=8, num_patches=64, qk_norm="rms", **more,
    )  # fmt: skip
    network.pos_embed.copy_(noise(*network.pos_embed.shape, seed=4))
    both = {
        "x": noise(2, 16, 6, 10), "timestep": torch.tensor([700.0, 700.0]), "context": noise(2, 9, 24),
        "y": noise(2, 12),
    }  # fmt: skip
    return Tiny(network, {"plain": both, "control": both | {"control": {"output": [noise(2, 15, 128, seed=9) * 0.1]}}})


@tiny("sd3.5 large")
def sd35_large() -> Tiny:
    return _sd3()


@tiny("sd3.5 medium")
def sd35_medium() -> Tiny:
    return _sd3(x_block_self_attn_layers=[0])


@tiny("auraflow")
def auraflow() -> Tiny:
    from comfy.ldm.aura.mmdit import MMDiT

    network = build(
        MMDiT, in_channels=4, out_channels=4, dim=64, n_layers=4, n_double_layers=2, n_heads=2, global_conddim=64,
        cond_seq_dim=24, max_seq=64,
    )  # fmt: skip
    plain = {"x": noise(2, 4, 6, 10), "timestep": torch.tensor([0.7, 0.7]), "context": noise(2, 9, 24)}
    return Tiny(network, {"plain": plain | {"control": None}})


_PIXELS = {
    "num_groups": 2, "hidden_size": 64, "pixel_hidden_size": 8, "pixel_attn_hidden_size": 32, "pixel_num_groups": 2,
    "patch_depth": 2, "pixel_depth": 1, "patch_size": 4, "txt_embed_dim": 24, "txt_max_length": 12,
}  # fmt: skip


@tiny("pixeldit")
def pixeldit() -> Tiny:
    from comfy.ldm.pixeldit.model import PixDiT_T2I

    plain = {"x": noise(2, 3, 18, 22), "timestep": torch.tensor([700.0, 700.0]), "context": noise(2, 9, 24)}
    return Tiny(build(PixDiT_T2I, **_PIXELS), {"plain": plain})


@tiny("pid")
def pid() -> Tiny:
    from comfy.ldm.pixeldit.pid import PidNet

    network = build(PidNet, **_PIXELS, lq_latent_channels=4, lq_hidden_dim=16, lq_num_res_blocks=1, pit_lq_inject=True)
    plain = {
        "x": noise(1, 3, 32, 64), "timestep": torch.tensor([700.0]), "context": noise(1, 9, 24),
        "lq_latent": noise(1, 4, 1, 2, seed=9), "degrade_sigma": torch.tensor([0.3]),
    }  # fmt: skip
    return Tiny(network, {"plain": plain})
