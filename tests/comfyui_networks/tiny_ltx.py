"""LTX-Video and LTX-2, tiny."""

from __future__ import annotations

from typing import Any

import torch

from tests.comfyui_networks.tiny import Tiny, build, noise, tiny


@tiny("ltx-video")
def ltx_video() -> Tiny:
    from comfy.ldm.lightricks.model import LTXVModel

    network = build(
        LTXVModel, in_channels=128, cross_attention_dim=128, attention_head_dim=64, num_attention_heads=2,
        caption_channels=48, num_layers=3,
    )  # fmt: skip
    plain = {
        "x": noise(1, 128, 3, 4, 7), "timestep": torch.tensor([0.7]), "context": noise(1, 9, 48),
        "attention_mask": None, "frame_rate": 25,
    }  # fmt: skip
    return Tiny(network, {"plain": plain})


_CONNECTORS = {"connector_attention_head_dim": 8, "connector_num_attention_heads": 2, "connector_num_layers": 1}


@tiny("ltx-2")
def ltx_2() -> Tiny:
    from comfy.ldm.lightricks.av_model import LTXAVModel

    network = build(
        LTXAVModel, in_channels=128, audio_in_channels=128, cross_attention_dim=128, audio_cross_attention_dim=64,
        attention_head_dim=64, audio_attention_head_dim=32, num_attention_heads=2, audio_num_attention_heads=2,
        caption_channels=48, num_layers=3, **_CONNECTORS,
    )  # fmt: skip
    plain = {
        "x": [noise(1, 128, 3, 4, 7), noise(1, 8, 13, 16)], "timestep": torch.tensor([0.7]),
        "context": noise(1, 9, 96), "attention_mask": None, "frame_rate": 25,
    }  # fmt: skip
    return Tiny(network, {"plain": plain})


@tiny("ltx-2.5")
def ltx_25() -> Tiny:
    """With what its files have and those of LTX-2 have not; texts have gone through the connectors."""
    from comfy.ldm.lightricks.av_model import LTXAVModel

    network = build(
        LTXAVModel, in_channels=128, audio_in_channels=128, cross_attention_dim=128, audio_cross_attention_dim=64,
        attention_head_dim=64, audio_attention_head_dim=32, num_attention_heads=2, audio_num_attention_heads=2,
        caption_channels=48, num_layers=3, cross_attention_adaln=True, apply_gated_attention=True, ff_bias=False,
        use_keyframes_abs_pos_embedding=True, caption_proj_before_connector=True, use_middle_indices_grid=True,
        frequencies_precision="float64", **_CONNECTORS,
    )  # fmt: skip
    plain = {
        "x": [noise(1, 128, 3, 4, 7), noise(1, 8, 13, 16)], "timestep": torch.tensor([0.7]),
        "context": noise(1, 9, 192), "attention_mask": None, "frame_rate": 25,
    }  # fmt: skip
    return Tiny(network, {"plain": plain})


def _guides(frames: int, batch: int) -> dict[str, Any]:
    """A keyframe of 4 by 6 tokens behind the video, and a stronger and a masked guide in it."""
    mask = torch.ones(batch, 1, frames, 4, 6)
    mask[:, :, -1] = 0.0
    mask[:, :, -1, 0, :2] = -1.0  # tokens of the keyframe that are left out
    keyframe = noise(batch, 3, 24, 2, seed=11).abs() * 8
    entries = [
        {"pre_filter_count": 12, "strength": 0.5, "pixel_mask": None, "latent_shape": None},
        {
            "pre_filter_count": 12, "strength": 0.8, "pixel_mask": noise(1, 1, 1, 16, 48, seed=12).abs().clamp(0, 1),
            "latent_shape": (1, 2, 6),
        },
    ]  # fmt: skip
    return {"keyframe_idxs": keyframe, "denoise_mask": mask, "guide_attention_entries": entries}


def _per_token(mask: torch.Tensor) -> torch.Tensor:
    return 0.7 * mask.clamp(min=0.0).flatten(1)


@tiny("ltx-video further inputs")
def ltx_video_further_inputs() -> Tiny:
    from comfy.ldm.lightricks.model import LTXVModel

    network = build(
        LTXVModel, in_channels=16, cross_attention_dim=64, attention_head_dim=32, num_attention_heads=2,
        caption_channels=24, num_layers=3, use_middle_indices_grid=True, cross_attention_adaln=True,
        use_keyframes_abs_pos_embedding=True,
    )  # fmt: skip
    both = {
        "x": noise(2, 16, 4, 4, 6), "timestep": torch.tensor([0.7, 0.7]), "context": noise(2, 9, 24),
        "attention_mask": (torch.arange(9)[None] < torch.tensor([[9], [5]])).long(), "frame_rate": 25,
    }  # fmt: skip
    guides = _guides(4, 2)
    by_token = {"timestep": _per_token(guides["denoise_mask"])}
    plain_guides = guides | {"guide_attention_entries": None}
    slots = {"generated_keyframes": {"first_latent_frame": 1, "num_keyframes": 1, "tokens_per_frame": 24}}
    return Tiny(
        network,
        {
            "masked": both, "keyframes": both | plain_guides | by_token, "guides": both | guides | by_token | slots,
        },
    )  # fmt: skip


@tiny("ltx-2 further inputs")
def ltx_2_further_inputs() -> Tiny:
    from comfy.ldm.lightricks.av_model import LTXAVModel

    network = build(
        LTXAVModel, in_channels=16, audio_in_channels=128, cross_attention_dim=64, audio_cross_attention_dim=32,
        attention_head_dim=32, audio_attention_head_dim=16, num_attention_heads=2, audio_num_attention_heads=2,
        caption_channels=24, num_layers=3, use_middle_indices_grid=True, cross_attention_adaln=True,
        apply_gated_attention=True, **_CONNECTORS,
    )  # fmt: skip
    plain = {
        "x": [noise(2, 16, 4, 4, 6), noise(2, 8, 13, 16)], "timestep": torch.tensor([0.7, 0.7]),
        "context": noise(2, 9, 48), "attention_mask": None, "frame_rate": 25,
    }  # fmt: skip
    guides = _guides(4, 2)
    by_token = {"timestep": [_per_token(guides["denoise_mask"]), torch.full((2, 13), 0.7)]}
    # Whole frames are masked: one row of the timestep for each.
    frames = torch.ones(2, 1, 4, 4, 6)
    frames[:, :, 0] = 0.0
    by_frame = {"denoise_mask": frames, "timestep": [_per_token(frames), torch.full((2, 13), 0.7)]}
    reference = {"ref_audio": {"tokens": noise(2, 5, 128, seed=13)}}
    stg = {"transformer_options": {"stg_self_attn_blocks": (1,)}}
    one_stream = {"x": [noise(2, 16, 4, 4, 6)]}
    return Tiny(
        network,
        {
            "by frame": plain | by_frame, "guides": plain | guides | by_token, "reference": plain | reference,
            "values alone": plain | stg, "without audio": plain | one_stream,
        },
    )  # fmt: skip
