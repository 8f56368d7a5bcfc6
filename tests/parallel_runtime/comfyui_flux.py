"""Runs ComfyUI's own FLUX forward on the CPU: the oracle of test_flux_model.py, in a process of its own.

    python comfyui_flux.py COMFYUI FOLDER

FOLDER holds cases.json, a list of {"name", "checkpoint", "options"}, and NAME.safetensors with the call's tensors
(ref_latents as ref_latents.0, ...). Writes NAME.out.safetensors, and found.json: checkpoint -> ComfyUI's model class.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def _arguments(tensors: dict[str, torch.Tensor]) -> dict:
    arguments: dict = {}
    for name, tensor in sorted(tensors.items()):
        if match := re.fullmatch(r"(.+)\.\d+", name):
            arguments.setdefault(match.group(1), []).append(tensor)
        else:
            arguments[name] = tensor
    return arguments


def main(comfyui: str, folder: Path) -> None:
    sys.path.insert(0, comfyui)
    from comfy.cli_args import args

    args.cpu = True
    import comfy.sd

    models: dict = {}
    for case in json.loads((folder / "cases.json").read_text()):
        path = case["checkpoint"]
        if path not in models:
            models[path] = comfy.sd.load_diffusion_model(path, model_options={"dtype": torch.float32}).model
        arguments = _arguments(load_file(folder / f"{case['name']}.safetensors"))
        with torch.no_grad():
            output = models[path].diffusion_model(**arguments, **case["options"])
        save_file({"output": output.contiguous()}, folder / f"{case['name']}.out.safetensors")
    found = {path: type(model.model_config).__name__ for path, model in models.items()}
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
