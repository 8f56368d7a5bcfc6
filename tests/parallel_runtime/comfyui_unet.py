"""ComfyUI's own UNetModel on the CPU, in a process of its own; called as comfyui_forward.py, which it does for U-Nets
of any width. (ComfyUI's loader takes a U-Net for SDXL by its published widths alone.)

    python -m tests.parallel_runtime.comfyui_unet COMFYUI FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def _main(comfyui: str, folder: Path) -> None:
    sys.path.insert(0, comfyui)
    from comfy.cli_args import args

    args.cpu = True
    import comfy.ops
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
    from comfy.model_detection import detect_unet_config
    from comfy.supported_models import SDXL

    models: dict[str, Any] = {}
    for case in json.loads((folder / "cases.json").read_text()):
        name = case["checkpoint"]
        if name not in models:
            state_dict = load_file(folder / f"{name}.safetensors")
            config = {**detect_unet_config(state_dict, ""), **SDXL.unet_extra_config}
            models[name] = UNetModel(**config, device="cpu", operations=comfy.ops.disable_weight_init)
            models[name].load_state_dict(state_dict)  # strict: every name is one of ComfyUI's, and none is missing
        arguments = load_file(folder / f"{case['name']}.safetensors")
        x, timestep = arguments.pop("x"), arguments.pop("timestep")
        with torch.no_grad():
            output = models[name](x, timestep, **arguments)
        save_file({"output": output.contiguous()}, folder / f"{case['name']}.out.safetensors")
    found = {name: type(model).__name__ for name, model in models.items()}
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]))
