"""Writes ControlNets of a U-Net's file: an ordinary one, and a ControlLoRA, which has the model's weights and factors.

python unet_controls.py COMFYUI SOURCE FOLDER: FOLDER/unet.safetensors and FOLDER/control-lora.safetensors.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ORDINARY, LORA = "unet.safetensors", "control-lora.safetensors"
_RANK = 4


def write(source: Path, folder: Path) -> None:
    """Random weights; those of a ControlLoRA that the model has are left to it, and some get factors."""
    import comfy.cldm.cldm
    import comfy.model_detection as detection
    import comfy.ops

    model = load_file(source)
    config: dict[str, Any] = dict(detection.model_config_from_unet(model, "").unet_config)
    config.pop("out_channels")
    net = comfy.cldm.cldm.ControlNet(
        **config | {"hint_channels": 3, "dtype": torch.float32, "operations": comfy.ops.disable_weight_init}
    )
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        drawn = torch.randn(shape, generator=generator)
        return drawn * (0.3 / drawn[0].numel() ** 0.5) if len(shape) > 1 else 0.1 * drawn

    tensors = {name: draw(*tensor.shape) for name, tensor in net.state_dict().items()}
    save_file(tensors, folder / ORDINARY)
    own = {name: tensor for name, tensor in tensors.items() if name not in model}
    assert len(own) < len(tensors)
    for name in [name for name in tensors if name in model and name.endswith("to_q.weight")]:
        layer, (rows, columns) = name.removesuffix(".weight"), tensors[name].shape
        own |= {f"{layer}.up": draw(rows, _RANK), f"{layer}.down": draw(_RANK, columns)}
    save_file({**own, "lora_controlnet": torch.zeros(())}, folder / LORA)


if __name__ == "__main__":
    comfyui, source, folder = map(Path, sys.argv[1:])
    sys.path.append(str(comfyui))
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    write(source, folder)
