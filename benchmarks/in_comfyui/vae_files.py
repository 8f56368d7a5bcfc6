"""Writes VAEs with random weights at real size, made by ComfyUI's classes: FOLDER/NAME.safetensors for each.

python -m benchmarks.in_comfyui.vae_files --comfyui ~/ComfyUI --folder models/vae
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from parallel_runtime.networks.comfyui.comfy_code import use_comfyui
from tests.comfyui_vaes.tiny import fill

from .vaes import VAES


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


_MAKERS: dict[str, Callable[[], nn.Module]] = {"flux": flux, "wan": wan}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    use_comfyui(str(options.comfyui), {"cpu": True})
    for name in VAES:
        weights = fill(_MAKERS[name]()).state_dict()
        save_file({key: value.to(torch.bfloat16) for key, value in weights.items()}, options.folder / VAES[name].file)


if __name__ == "__main__":
    main()
