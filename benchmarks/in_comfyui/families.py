"""The models that are measured, at real size and tiny: what their files hold and what their graphs take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.flux_facts import FLUX_CONFIG
from parallel_runtime.networks.diffusers.flux import FLUX, FLUX2
from parallel_runtime.networks.diffusers.sd3 import SD3
from parallel_runtime.networks.diffusers.sdxl import SDXL
from parallel_runtime.networks.diffusers.spec import ModelSpec
from parallel_runtime.networks.diffusers.wan import WAN

ENDING = ".safetensors"
TWIN = "-b"
"""Ends the name of a second file of a family, with other weights: two experts, base and refiner."""


@dataclass(frozen=True)
class Text:
    """A CONDITIONING: tokens, their width, width of the pooled one (0: none), guidance (0: none)."""

    length: int
    width: int
    pooled: int = 0
    guidance: float = 0.0


@dataclass(frozen=True)
class Family:
    """One model.

    Args:
        config: of the diffusers class.
        latent: node that makes an empty latent.
        size: width and height in pixels.
        frames: of a video; 0 for a picture.
        steps: of a prompt that is timed.
        gigabytes: of its file, about; what the disk must have free.
        vae: config of diffusers' AutoencoderKL, where pictures are decoded too.
    """

    name: str
    title: str
    spec: ModelSpec
    config: Mapping[str, Any]
    latent: str
    text: Text
    steps: int
    gigabytes: float
    size: tuple[int, int] = (1024, 1024)
    frames: int = 0
    cfg: float = 1.0
    scheduler: str = "simple"
    dtype: torch.dtype = torch.bfloat16
    prefix: str = ""
    vae: Mapping[str, Any] | None = None

    @property
    def described(self) -> str:
        """Title and size, for tables."""
        frames = f", {self.frames} frames" if self.frames else ""
        cfg = ", CFG" if self.cfg > 1 else ""
        return f"{self.title}, {self.size[0]} × {self.size[1]}{frames}{cfg}"

    def scaled(self, factor: int) -> Family:
        """The same with a larger picture."""
        return replace(self, size=(self.size[0] * factor, self.size[1] * factor))


_KLEIN = {
    "patch_size": 1,
    "in_channels": 128,
    "out_channels": 128,
    "num_layers": 5,
    "num_single_layers": 20,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 7680,
    "timestep_guidance_channels": 256,
    "mlp_ratio": 3.0,
    "axes_dims_rope": (32, 32, 32, 32),
    "rope_theta": 2000,
    "eps": 1e-6,
    "guidance_embeds": False,
}
_SD35_LARGE = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 38,
    "attention_head_dim": 64,
    "num_attention_heads": 38,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 2432,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 192,
    "dual_attention_layers": (),
    "qk_norm": "rms_norm",
}
_SDXL = {
    "sample_size": 128,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "mid_block_type": "UNetMidBlock2DCrossAttn",
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "layers_per_block": 2,
    "transformer_layers_per_block": (1, 2, 10),
    "reverse_transformer_layers_per_block": None,
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}


def _wan(heads: int, feed_forward: int, layers: int) -> dict[str, Any]:
    return {
        "patch_size": (1, 2, 2),
        "num_attention_heads": heads,
        "attention_head_dim": 128,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": 4096,
        "freq_dim": 256,
        "ffn_dim": feed_forward,
        "num_layers": layers,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "eps": 1e-6,
        "image_dim": None,
        "added_kv_proj_dim": None,
        "pos_embed_seq_len": None,
    }


def _vae(channels: int, quantised: bool) -> dict[str, Any]:
    return {
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "block_out_channels": (128, 256, 512, 512),
        "layers_per_block": 2,
        "latent_channels": channels,
        "use_quant_conv": quantised,
        "use_post_quant_conv": quantised,
    }


_VAE_16, _VAE_4 = _vae(16, quantised=False), _vae(4, quantised=True)
_FLUX_LATENT, _VIDEO_LATENT = "EmptySD3LatentImage", "EmptyHunyuanLatentVideo"
_WAN_TEXT = Text(512, 4096)
_UNET = "model.diffusion_model."

REAL = {
    family.name: family
    for family in (
        Family(
            "flux", "FLUX.1-dev", FLUX, FLUX_CONFIG, _FLUX_LATENT, Text(512, 4096, 768, 3.5), 12, 23.9, vae=_VAE_16
        ),
        Family("klein", "FLUX.2 klein 4B", FLUX2, _KLEIN, "EmptyFlux2LatentImage", Text(512, 7680), 16, 7.8),
        Family(
            "sd35", "SD3.5 large", SD3, _SD35_LARGE, _FLUX_LATENT, Text(154, 4096, 2048), 12, 16.3,
            cfg=4.5, vae=_VAE_16,
        ),
        Family(
            "sdxl", "SDXL", SDXL, _SDXL, "EmptyLatentImage", Text(77, 2048, 1280), 20, 5.2,
            cfg=7.0, scheduler="normal", dtype=torch.float16, prefix=_UNET, vae=_VAE_4,
        ),
        Family(
            "wan1", "Wan 2.1 1.3B", WAN, _wan(12, 8960, 30), _VIDEO_LATENT, _WAN_TEXT, 8, 2.9,
            size=(832, 480), frames=81, cfg=6.0,
        ),
        Family(
            "wan14", "Wan 2.1 14B", WAN, _wan(40, 13824, 40), _VIDEO_LATENT, _WAN_TEXT, 4, 28.7,
            size=(832, 480), frames=81, cfg=6.0,
        ),
    )
}  # fmt: skip


def tiny() -> dict[str, Family]:
    """The same families for CPUs, in float32: they try the commands and say nothing about speed."""
    from tests import tiny_flux, tiny_flux2, tiny_sd3, tiny_sdxl, tiny_wan

    changes: dict[str, tuple[dict[str, Any], Text]] = {
        "flux": (tiny_flux.tiny_config(), Text(7, 64, 32, 3.5)),
        "klein": (tiny_flux2.tiny_config(guidance_embeds=False), Text(7, 64)),
        "sd35": (tiny_sd3.tiny_config(dual_attention_layers=()), Text(7, 64, 32)),
        "sdxl": (tiny_sdxl.recognised_config(), Text(77, 2048, 1280)),
        "wan1": (tiny_wan.tiny_config(), Text(7, 4096)),
        "wan14": (tiny_wan.tiny_config(num_layers=3), Text(7, 4096)),
    }
    made = {}
    for name, (config, text) in changes.items():
        small: dict[str, Any] = {"size": (64, 64), "steps": 4, "gigabytes": 0.2, "dtype": torch.float32}
        frames = 5 if REAL[name].frames else 0
        made[name] = replace(REAL[name], config=config, text=text, frames=frames, **small)
    return made


def family_of(file: str, families: Mapping[str, Family]) -> Family:
    """The family that a file's name stands for."""
    return families[file.removesuffix(TWIN)]
