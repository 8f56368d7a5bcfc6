"""ComfyUI's own forward on the CPU, in a process of its own: the oracle of the model tests.

    python -m tests.parallel_runtime.comfyui_forward COMFYUI FOLDER

FOLDER holds cases.json, a list of {"name", "checkpoint", "options"}, and NAME.safetensors with the call's tensors
(ref_latents as ref_latents.0, ...). Writes NAME.out.safetensors, and found.json: checkpoint -> ComfyUI's model class.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.comfyui_networks.script import run_script

Case = tuple[str, dict[str, Any]]
"""(name of the checkpoint, arguments of the call: x, timestep, context and extras)."""


def run_comfyui(
    comfyui: Path, folder: Path, cases: Mapping[str, Case], module: str = "comfyui_forward"
) -> dict[str, str]:
    """Run the cases on the checkpoints FOLDER/NAME.safetensors; return name of the checkpoint -> ComfyUI's class.

    Args:
        module: beside this one, and called like it.
    """
    listed = []
    for name, (checkpoint, arguments) in cases.items():
        tensors = {key: value for key, value in arguments.items() if isinstance(value, torch.Tensor)}
        for number, reference in enumerate(arguments.get("ref_latents", ())):
            tensors[f"ref_latents.{number}"] = reference
        save_file(tensors, folder / f"case {name}.safetensors")
        options = {key: value for key, value in arguments.items() if isinstance(value, str)}
        listed.append({"name": f"case {name}", "checkpoint": checkpoint, "options": options})
    (folder / "cases.json").write_text(json.dumps(listed))
    run_script(comfyui, f"tests.parallel_runtime.{module}", [comfyui, folder])
    return json.loads((folder / "found.json").read_text())


def output_of(folder: Path, name: str) -> torch.Tensor:
    """What ComfyUI gave for a case."""
    return load_file(folder / f"case {name}.out.safetensors")["output"]


def _arguments(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for name, tensor in sorted(tensors.items()):
        if match := re.fullmatch(r"(.+)\.\d+", name):
            arguments.setdefault(match.group(1), []).append(tensor)
        else:
            arguments[name] = tensor
    return arguments


def _main(comfyui: str, folder: Path) -> None:
    sys.path.insert(0, comfyui)
    from comfy.cli_args import args

    args.cpu = True
    import comfy.sd

    models: dict[str, Any] = {}
    for case in json.loads((folder / "cases.json").read_text()):
        name = case["checkpoint"]
        if name not in models:
            path = str(folder / f"{name}.safetensors")
            models[name] = comfy.sd.load_diffusion_model(path, model_options={"dtype": torch.float32}).model
        arguments = _arguments(load_file(folder / f"{case['name']}.safetensors"))
        # The families name these two differently, and all have them first.
        x, timestep = arguments.pop("x"), arguments.pop("timestep")
        with torch.no_grad():
            output = models[name].diffusion_model(x, timestep, **arguments, **case["options"])
        save_file({"output": output.contiguous()}, folder / f"{case['name']}.out.safetensors")
    found = {name: type(model.model_config).__name__ for name, model in models.items()}
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]))
