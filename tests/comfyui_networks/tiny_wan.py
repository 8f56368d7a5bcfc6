"""Wan and its relatives, tiny."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from tests.comfyui_networks.tiny import Tiny, build, noise, tiny


def _wan(kind: str, channels: int, out: int, timestep: torch.Tensor, **more: Any) -> Tiny:
    from comfy.ldm.wan.model import WanModel

    network = build(
        WanModel, model_type=kind, in_dim=channels, dim=128, ffn_dim=256, text_dim=48, out_dim=out, num_heads=1,
        num_layers=3,
    )  # fmt: skip
    plain = {"x": noise(1, channels, 3, 6, 10), "timestep": timestep, "context": noise(1, 512, 48), **more}
    return Tiny(network, {"plain": plain})


@tiny("wan t2v")
def wan_t2v() -> Tiny:
    return _wan("t2v", 16, 16, torch.tensor([700.0]))


@tiny("wan i2v")
def wan_i2v() -> Tiny:
    return _wan("i2v", 36, 16, torch.tensor([700.0]), clip_fea=noise(1, 257, 1280, seed=6))


@tiny("wan ti2v")
def wan_ti2v() -> Tiny:
    return _wan("t2v", 48, 48, torch.tensor([[0.0, 700.0, 700.0]]))


def _small(model: str, module: str = "model", /, **options: Any) -> Any:
    """One of comfy.ldm.wan with two heads of 24 and three layers."""
    network = getattr(importlib.import_module(f"comfy.ldm.wan.{module}"), model)
    return build(network, **({"dim": 48, "ffn_dim": 96, "text_dim": 24, "num_heads": 2, "num_layers": 3} | options))


def _call(channels: int, frames: int = 3, size: tuple[int, int] = (6, 10), batch: int = 1) -> dict[str, Any]:
    return {
        "x": noise(batch, channels, frames, *size), "timestep": torch.full((batch,), 700.0),
        "context": noise(batch, 13, 24, seed=7),
    }  # fmt: skip


def _by_frame(batch: int, frames: int) -> torch.Tensor:
    return torch.tensor([[0.0, *[700.0] * (frames - 1)]]).expand(batch, -1).contiguous()


@tiny("wan further inputs")
def wan_further_inputs() -> Tiny:
    network = _small("WanModel", model_type="t2v", in_dim=16, out_dim=16, in_dim_ref_conv=16)
    plain = _call(16, batch=2)
    return Tiny(
        network,
        {
            "reference": plain | {"reference_latent": noise(2, 16, 6, 10, seed=8)},
            "frames behind": plain | {"time_dim_concat": noise(2, 16, 2, 6, 10, seed=9)},
            "context latents": plain | {"context_latents": [noise(2, 16, 2, 4, 6, seed=10), noise(2, 16, 1, 6, 6)]},
            "by frame": plain | {"timestep": _by_frame(2, 3)},
            "by frame, context": plain | {"timestep": _by_frame(2, 3), "context_latents": [noise(2, 16, 1, 4, 4)]},
        },
    )


def _add_mean(arguments: dict[str, Any]) -> dict[str, Any]:
    """A patch between blocks that mixes all tokens."""
    return {"img": arguments["img"] + arguments["img"].mean(1, keepdim=True)}


def _replaced(arguments: dict[str, Any], block: dict[str, Any]) -> dict[str, Any]:
    return _add_mean(block["original_block"](arguments))


@tiny("wan patched")
def wan_patched() -> Tiny:
    plain = _call(16, batch=2)
    inside = {
        "attn1_patch": [lambda arguments: arguments["x"] + arguments["k"].flatten(2).mean(1, keepdim=True)],
        "attn2_patch": [lambda arguments: arguments["x"] + arguments["x"][:, :7].mean(1, keepdim=True)],
    }
    options = {
        "between": {"patches": {"double_block": [_add_mean]}},
        "inside": {"patches": inside},
        "instead": {"patches_replace": {"dit": {("double_block", 1): _replaced}}},
    }
    network = _small("WanModel", model_type="t2v", in_dim=16, out_dim=16)
    return Tiny(network, {name: plain | {"transformer_options": each} for name, each in options.items()})


@tiny("multitalk")
def multitalk() -> Tiny:
    from comfy.ldm.wan import model_multitalk

    class Patch(nn.Module):
        """The audio attention of InfiniteTalk's model patch."""

        def __init__(self) -> None:
            super().__init__()
            block = model_multitalk.WanMultiTalkAttentionBlock
            self.blocks = nn.ModuleList(build(block, in_dim=80, out_dim=24) for _ in range(3))
            self.model = self

    masks = (torch.arange(15)[None] < torch.tensor([[7], [15]])).float()
    masks[1] -= masks[0]
    audio = noise(3, 10, 24, seed=8)
    patches = {
        "attn1_patch": [model_multitalk.MultiTalkGetAttnMapPatch(masks)],
        "attn2_patch": [model_multitalk.MultiTalkCrossAttnPatch(Patch(), 1.0, masks)],
    }
    network = _small("WanModel", model_type="i2v", in_dim=36, out_dim=16, dim=80)
    plain = _call(36) | {"clip_fea": noise(1, 257, 1280, seed=6)}
    two = plain | {"transformer_options": {"patches": patches, "audio_embeds": audio}}
    one = {"patches": {"attn2_patch": patches["attn2_patch"]}, "audio_embeds": audio}
    return Tiny(network, {"one": plain | {"transformer_options": one}, "two": two})


@tiny("wan first and last frame")
def wan_first_and_last() -> Tiny:
    network = _small("WanModel", model_type="i2v", in_dim=36, out_dim=16, flf_pos_embed_token_number=514)
    return Tiny(network, {"clip vision": _call(36) | {"clip_fea": noise(1, 514, 1280, seed=6)}})


@tiny("wan vace")
def wan_vace() -> Tiny:
    network = _small("VaceWanModel", in_dim=16, out_dim=16, num_layers=4, vace_layers=2, vace_in_dim=96)
    plain = _call(16, batch=2)
    one = {"vace_context": noise(2, 1, 96, 3, 6, 10, seed=8), "vace_strength": [1.0]}
    two = {"vace_context": noise(2, 2, 96, 3, 6, 10, seed=9), "vace_strength": [1.0, 0.5]}
    return Tiny(network, {"one": plain | one, "two": plain | two})


@tiny("wan camera")
def wan_camera() -> Tiny:
    network = _small("CameraWanModel", in_dim=32, out_dim=16)
    camera = {"camera_conditions": noise(2, 24, 3, 48, 80, seed=8), "clip_fea": noise(2, 257, 1280, seed=6)}
    return Tiny(network, {"plain": _call(32, batch=2), "camera": _call(32, batch=2) | camera})


@tiny("wan s2v")
def wan_s2v() -> Tiny:
    network = _small("WanModel_S2V", in_dim=16, out_dim=16, audio_dim=32, audio_inject_layers=[0, 2])
    plain = _call(16, size=(8, 8), batch=2)
    audio = {"audio_embed": noise(2, 25, 32, 12, seed=8)}
    others = {
        "reference_latent": noise(2, 16, 1, 8, 8, seed=9), "control_video": noise(2, 16, 3, 8, 8, seed=10),
        "reference_motion": noise(2, 16, 19, 8, 8, seed=11),
    }  # fmt: skip
    return Tiny(network, {"plain": plain, "audio": plain | audio, "all": plain | audio | others})


@tiny("humo")
def humo() -> Tiny:
    from comfy.ldm.wan.model import AudioProjModel

    network = _small("HumoWanModel", in_dim=36, out_dim=16)
    network.audio_proj = build(AudioProjModel, seq_len=8, blocks=5, channels=4, intermediate_dim=8, output_dim=1536)
    plain = _call(36, batch=2)
    audio = {"audio_embed": noise(2, 3, 8, 5, 4, seed=8)}
    reference = {"reference_latent": noise(2, 36, 1, 6, 10, seed=9)}
    return Tiny(network, {"plain": plain, "audio": plain | audio, "reference": plain | audio | reference})


def _scail(model: str, **more: Any) -> Tiny:
    network = _small(model, in_dim=20, out_dim=16)
    plain = _call(20, size=(8, 8), batch=2)
    pose = {"pose_latents": noise(2, 20, 3, 4, 4, seed=8), "clip_fea": noise(2, 257, 1280, seed=6)}
    reference = {"reference_latent": noise(2, 20, 1, 8, 8, seed=9)}
    by_frame = {"timestep": _by_frame(2, 3)}
    calls = {"plain": plain, "pose": plain | pose | by_frame, "reference": plain | pose | reference}
    return Tiny(network, calls | ({"masks": plain | pose | reference | more} if more else {}))


@tiny("scail")
def scail() -> Tiny:
    return _scail("SCAILWanModel")


@tiny("scail 2")
def scail_2() -> Tiny:
    return _scail(
        "SCAIL2WanModel", ref_mask_latents=noise(2, 28, 4, 8, 8, seed=10), sam_latents=noise(2, 28, 3, 4, 4, seed=11),
        ref_mask_flag=False,
    )  # fmt: skip


class _Motion(nn.Module):
    """In the place of a face encoder of pictures of 512 pixels, which is outside of blocks."""

    def get_motion(self, faces: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.adaptive_avg_pool2d(faces.mean(1), (16, 32)).flatten(1)


@tiny("wan animate")
def wan_animate() -> Tiny:
    network = _small("AnimateWanModel", "model_animate", in_dim=36, out_dim=16, num_layers=5)
    network.motion_encoder = _Motion()
    plain = _call(36, batch=2)
    pose = {"pose_latents": noise(2, 16, 2, 6, 10, seed=8), "clip_fea": noise(2, 257, 1280, seed=6)}
    face = {"face_pixel_values": noise(2, 3, 8, 32, 64, seed=9)}
    return Tiny(network, {"plain": plain, "pose": plain | pose, "face": plain | pose | face})


@tiny("wandancer")
def wandancer() -> Tiny:
    network = _small("WanDancerModel", "model_wandancer", in_dim=36, out_dim=16, audio_inject_layers=[0, 2])
    plain = _call(36, size=(8, 8), batch=2)
    music = {"audio_embed": noise(2, 40, 35, seed=8)}
    pictures = {"clip_fea": noise(2, 257, 1280, seed=6), "clip_fea_ref": noise(2, 257, 1280, seed=9), "fps": 15.0}
    return Tiny(network, {"plain": plain, "music": plain | music, "pictures": plain | music | pictures})


@tiny("wan causal")
def wan_causal() -> Tiny:
    network = _small("CausalWanModel", "ar_model", in_dim=16, out_dim=16)
    return Tiny(network, {"plain": _call(16), "batch": _call(16, batch=2)})
