"""Writes a model file again in the formats that ComfyUI reads, by ComfyUI's own quantisation.

python formats.py COMFYUI SOURCE FOLDER [FORMAT ...]: FOLDER/FORMAT.safetensors for each of FORMATS, or of those named,
that this ComfyUI has; prints their names as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

FORMATS: dict[str, dict[str, Any]] = {
    "float8_e4m3fn": {},
    "scaled_fp8": {},
    "fp8": {},
    "mxfp8": {},
    "nvfp4": {},
    "int8_tensorwise": {},
    "int8_rotated": {"convrot": True, "convrot_groupsize": 256},
    "convrot_w4a4": {"convrot_groupsize": 256},
    "asym_w4a8_int8": {"convrot_groupsize": 256},
}
"""Format -> what a layer's description holds beside its name. `scaled_fp8` are the old keys, `fp8` is a plain cast."""


def write(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """The tensors with the products of all blocks in that format."""
    import comfy.quant_ops as quant

    made = {key: tensor.to(torch.bfloat16) for key, tensor in tensors.items()}
    for key in [key for key in made if key.endswith(".weight") and made[key].ndim == 2 and "blocks." in key]:
        layer, weight = key.removesuffix(".weight"), made[key]
        if name == "fp8":
            made[key] = weight.to(torch.float8_e4m3fn)
        elif name == "scaled_fp8":
            scale = weight.abs().max().float() / 448
            made[key], made[f"{layer}.scale_weight"] = (weight.float() / scale).to(torch.float8_e4m3fn), scale
        else:
            kind = "int8_tensorwise" if name.startswith("int8") else name
            options: dict[str, Any] = {} if name == "mxfp8" else {"scale": "recalculate"}
            options |= {"per_channel": True, **FORMATS[name]} if FORMATS[name] else {}
            layout = quant.QUANT_ALGOS[kind]["comfy_tensor_layout"]
            made |= quant.QuantizedTensor.from_float(made.pop(key), layout, **options).state_dict(key)
            said = json.dumps({"format": kind, **FORMATS[name]}).encode()
            made[f"{layer}.comfy_quant"] = torch.tensor(list(said), dtype=torch.uint8)
    if name == "scaled_fp8":
        made["scaled_fp8"] = torch.empty(2, dtype=torch.float8_e4m3fn)
    return {key: tensor.contiguous() for key, tensor in made.items()}


if __name__ == "__main__":
    comfyui, source, folder = map(Path, sys.argv[1:4])
    sys.path.append(str(comfyui))
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    from comfy.model_detection import convert_diffusers_mmdit

    tensors = load_file(source)
    tensors = convert_diffusers_mmdit(tensors) or tensors  # diffusers' layers are parts of ComfyUI's
    written = []
    for each in sys.argv[4:] or FORMATS:
        try:
            contents = write(tensors, each)
        except (ImportError, KeyError, AttributeError) as error:  # an older ComfyUI
            print(each, repr(error), file=sys.stderr)
            continue
        save_file(contents, folder / f"{each}.safetensors")
        written.append(each)
    print(json.dumps(written))
