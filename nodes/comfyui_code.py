"""Which ComfyUI this is, and how it was started: what the ranks need to compute as it would."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import comfy
import comfy.cli_args

from parallel_runtime.requests.comfyui_code import ComfyuiCode, Scalar

if TYPE_CHECKING:
    import torch


def comfyui_code(weights: torch.dtype | None, fast_float8: bool = False, gguf: str = "") -> ComfyuiCode:
    """This ComfyUI, for a request whose plain weights are to have a type, None if quantised; see ComfyuiCode."""
    folder = Path(next(iter(comfy.__path__))).resolve().parent
    usual = vars(comfy.cli_args.parser.parse_args([]))
    options: dict[str, Scalar] = {
        name: value
        for name, value in vars(comfy.cli_args.args).items()
        if isinstance(value, Scalar) and value != usual.get(name)
    }
    options["fast"] = ",".join(sorted(feature.value for feature in comfy.cli_args.args.fast or ()))
    name = "" if weights is None else str(weights).removeprefix("torch.")
    return ComfyuiCode(str(folder), options, name, fast_float8, gguf)
