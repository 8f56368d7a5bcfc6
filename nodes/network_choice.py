"""Which network runs a model: ComfyUI's own a file, diffusers' class a folder. Decided here alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from parallel_runtime.errors import UnsupportedModelError
from parallel_runtime.said import NOTHING, Said, said

from .carried_patches import who_made
from .model_files import find_gguf_pack, is_gguf

if TYPE_CHECKING:
    from parallel_runtime.loading.checkpoint import Checkpoint
    from parallel_runtime.loading.host_file import HostFile

_OF_COMFYUI = "comfy."


@dataclass(frozen=True)
class Chosen:
    """A file, opened for the network that runs it: diffusers' or ComfyUI's own.

    Args:
        why: what the node should say of it, a sentence; "" for nothing.
    """

    opened: Checkpoint | HostFile
    why: Said = NOTHING


def choose_network(path: Path, weight_dtype: str = "default") -> Chosen:
    """Open a file for ComfyUI's own network, or a folder for diffusers' class.

    Raises:
        CheckpointError: missing or damaged files.
        UnsupportedModelError: no network runs it.
    """
    from parallel_runtime.loading.checkpoint import open_checkpoint
    from parallel_runtime.loading.host_file import open_host_file
    from parallel_runtime.networks.diffusers.package import absent, is_installed

    float8 = weight_dtype.startswith("fp8")
    if is_gguf(path):
        if float8:
            raise UnsupportedModelError(
                said(
                    "{path} is a GGUF file, whose weights stay as they are: {setting} does not take them.",
                    path=path,
                    setting=f"weight_dtype {weight_dtype}",
                ),
                "Set weight_dtype to default.",
            )
        return _of_comfyui(open_host_file(path, find_gguf_pack(path)))
    if not path.is_dir():
        return _of_comfyui(open_host_file(path))
    if float8:
        raise UnsupportedModelError(
            said("The diffusers network has no weights of the type {weight_dtype}.", weight_dtype=weight_dtype),
            "Set weight_dtype to default.",
        )
    if not is_installed():
        raise absent()
    return Chosen(open_checkpoint(path))


def _of_comfyui(file: HostFile) -> Chosen:
    """A file for ComfyUI's network; refuses what ComfyUI cannot build, with its reason, and what is a node pack's own:
    no rank has its code."""
    network = file.build()
    for made in (file.config, network):
        if not type(made).__module__.startswith(_OF_COMFYUI):
            whose = who_made(type(made))
            raise UnsupportedModelError(
                said(
                    "{name} is a model of a node pack's own, {whose}, which the workers do not have.",
                    name=file.path.name,
                    whose=whose,
                ),
                "Load it with Load Diffusion Model, or with that pack's loader.",
            )
    why = NOTHING
    if missing := file.missing(network):
        why = said(
            "The file lacks {count} of the network's weights, first {name}: what is in their place is by chance, as "
            "with ComfyUI's own loader.",
            count=len(missing),
            name=missing[0],
        )
    return Chosen(file, why)
