"""Writes VAEs with random weights at real size, made by ComfyUI's classes.

python -m benchmarks.in_comfyui.vae_files --comfyui ~/ComfyUI --folder models/vae flux wan
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from parallel_runtime.networks.comfyui.comfy_code import use_comfyui
from tests.comfyui_vaes.tiny import fill

from .vaes import vae_file


def flux() -> nn.Module:
    """FLUX.1's."""
    from comfy.ldm.models.autoencoder import AutoencodingEngine

    sizes: dict[str, object] = {"double_z": True, "z_channels": 16, "resolution": 256, "in_channels": 3, "out_ch": 3}
    sizes |= {"ch": 128, "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0}
    parts = "comfy.ldm.modules.diffusionmodules.model"
    return AutoencodingEngine(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
        encoder_config={"target": f"{parts}.Encoder", "params": sizes},
        decoder_config={"target": f"{parts}.Decoder", "params": sizes},
    )


def wan() -> nn.Module:
    """Wan 2.1's."""
    from comfy.ldm.wan.vae import WanVAE

    sizes = {"dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_scales": [], "dropout": 0.0}
    return WanVAE(dim=96, z_dim=16, temperal_downsample=[False, True, True], **sizes)


def flux2() -> nn.Module:
    """FLUX.2's."""
    from comfy.ldm.models.autoencoder import AutoencoderKL

    sizes: dict[str, object] = {"double_z": True, "z_channels": 32, "resolution": 256, "in_channels": 3, "out_ch": 3}
    sizes |= {"ch": 128, "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0}
    return AutoencoderKL(embed_dim=32, ddconfig=sizes | {"batch_norm_latent": True})


def ltx() -> nn.Module:
    """That of LTX-Video 0.9.5, which ComfyUI takes where a file has no configuration; LTX-2's is its like."""
    from comfy.ldm.lightricks.vae.causal_video_autoencoder import VideoVAE

    return VideoVAE(version=2, config=None)


def h3() -> nn.Module:
    """MiniMax H3's for pictures; `in_int8` makes of it what the official templates load."""
    import comfy.ops
    from comfy.ldm.minimax.vae import MiniMaxH3VideoVAE

    return MiniMaxH3VideoVAE(operations=comfy.ops.disable_weight_init)


MAKERS: dict[str, Callable[[], nn.Module]] = {"flux": flux, "flux2": flux2, "wan": wan, "ltx": ltx, "h3": h3}
"""ComfyUI's classes, by the name of the file."""


def in_int8(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights with those of a transformer's products in int8, to be used with rotated inputs, as ComfyUI reads them."""
    said = list(json.dumps({"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}).encode())
    made = dict(weights)
    for name, value in weights.items():
        if "transformer_blocks" in name and value.ndim == 2:
            scale, layer = value.float().abs().amax(1, keepdim=True) / 127, name.removesuffix("weight")
            made[name] = (value / scale).round().to(torch.int8)
            made |= {f"{layer}weight_scale": scale, f"{layer}comfy_quant": torch.tensor(said, dtype=torch.uint8)}
    return made


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("names", nargs="+", choices=list(MAKERS))
    options = parser.parse_args()
    use_comfyui(str(options.comfyui), {"cpu": True})
    for name in options.names:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            made = MAKERS[name]()
        weights = {key: _halved(value) for key, value in fill(made).state_dict().items()}
        save_file(in_int8(weights) if name == "h3" else weights, options.folder / vae_file(name))


def _halved(value: torch.Tensor) -> torch.Tensor:
    """Weights are bfloat16 in the file; counters stay as they are."""
    return value.to(torch.bfloat16).contiguous() if value.is_floating_point() else value


if __name__ == "__main__":
    main()
