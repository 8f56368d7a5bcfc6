"""The weights of a MODEL whose network is in the pool, for nodes that want them: ComfyUI reads the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.sd
import torch

from parallel_runtime.errors import RequestError


def load_here(path: str, dtype: torch.dtype | None) -> Any:
    """What Load Diffusion Model makes of the file, in ComfyUI's process and memory.

    Args:
        dtype: of plain weights; None where the file says it itself.

    Raises:
        RequestError: it is a folder of diffusers', which ComfyUI does not read.
    """
    if Path(path).is_dir():
        raise RequestError(
            f"{path} is a diffusers folder, whose weights ComfyUI does not read.",
            "Choose a .safetensors file in Parallel Loader.",
        )
    return comfy.sd.load_diffusion_model(path, model_options={} if dtype is None else {"dtype": dtype})


def with_patches_of(patcher: Any, path: str, dtype: torch.dtype | None) -> Any:
    """The same, on its device, with the weight patches of another MODEL of the file in it."""
    here = load_here(path, dtype)
    here.patches = {key: list(patches) for key, patches in patcher.patches.items()}
    here.patches_uuid = patcher.patches_uuid
    comfy.model_management.load_models_gpu([here], force_patch_weights=True)
    return here


def refuse(what: str) -> RequestError:
    """The error of a node that cannot have them.

    Args:
        what: it wants to do, as the end of a sentence.
    """
    return RequestError(
        f"The weights of this MODEL are in the pool of processes, where no node can {what}.",
        "Load the model with Load Diffusion Model for that.",
    )
