"""Which network runs a file: the diffusers class that we accelerate most, or ComfyUI's own. Decided here alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from parallel_runtime.errors import UnsupportedModelError

from .carried_patches import who_made
from .gguf_files import find_gguf_pack, is_gguf

if TYPE_CHECKING:
    from parallel_runtime.loading.checkpoint import Checkpoint
    from parallel_runtime.loading.host_file import HostFile

_OF_COMFYUI = "comfy."
AUTO, DIFFUSERS, COMFYUI = "auto", "diffusers", "ComfyUI"
NETWORKS = (AUTO, DIFFUSERS, COMFYUI)


@dataclass(frozen=True)
class Chosen:
    """A file, opened for the network that runs it: diffusers' or ComfyUI's own.

    Args:
        why: for the node, a sentence; "" where there was no choice to explain.
    """

    opened: Checkpoint | HostFile
    why: str = ""


def choose_network(path: Path, wanted: str = AUTO, weight_dtype: str = "default") -> Chosen:
    """Open a file or folder for a network.

    `auto` takes diffusers' class where there is one for the file, and its weights are plain and to stay so; else
    ComfyUI's.

    Raises:
        CheckpointError: missing or damaged files.
        UnsupportedModelError: the network that was asked for does not run it, or none does.
    """
    from parallel_runtime.loading.checkpoint import open_checkpoint

    if is_gguf(path):
        return _choose_for_gguf(path, wanted, weight_dtype)
    if wanted == COMFYUI:
        return _of_comfyui(_recognise(path), "Runs ComfyUI's own network, as asked.")
    if weight_dtype.startswith("fp8"):
        if wanted == DIFFUSERS:
            raise UnsupportedModelError(
                f"The diffusers network has no weights of the type {weight_dtype}.",
                "Set network to auto, or weight_dtype to default.",
            )
        return _of_comfyui(_recognise(path), f"Runs ComfyUI's own network, as weight_dtype is {weight_dtype}.")
    try:
        return Chosen(open_checkpoint(path))
    except UnsupportedModelError as error:
        if wanted == DIFFUSERS or path.is_dir():
            raise
        try:
            file = _recognise(path)
        except UnsupportedModelError:
            # What it is instead, in words, helps more than that ComfyUI does not know it either.
            raise UnsupportedModelError(f"{error.cause} ComfyUI does not recognise it either.", error.fix) from error
        why = error.cause.replace(str(path), path.name)
        return _of_comfyui(file, f"Runs ComfyUI's own network: {why}")


def _choose_for_gguf(path: Path, wanted: str, weight_dtype: str) -> Chosen:
    from parallel_runtime.loading.host_file import open_host_file

    if wanted == DIFFUSERS or weight_dtype.startswith("fp8"):
        setting = "the diffusers network" if wanted == DIFFUSERS else f"weight_dtype {weight_dtype}"
        raise UnsupportedModelError(
            f"{path} is a GGUF file, whose weights stay as they are: {setting} does not take them.",
            "Set network to auto and weight_dtype to default.",
        )
    file = open_host_file(path, find_gguf_pack(path))
    return _of_comfyui(file, "Runs ComfyUI's own network, on the file's weights as they are, by ComfyUI-GGUF.")


def _of_comfyui(file: HostFile, why: str) -> Chosen:
    """A file for ComfyUI's network; refuses what ComfyUI cannot build, with its reason, and what is a node pack's own:
    no rank has its code."""
    network = file.build()
    for made in (file.config, network):
        if not type(made).__module__.startswith(_OF_COMFYUI):
            whose = who_made(type(made))
            raise UnsupportedModelError(
                f"{file.path.name} is a model of a node pack's own, {whose}, which the pool does not have.",
                "Load it with Load Diffusion Model, or with that pack's loader.",
            )
    if missing := file.missing(network):
        why += (
            f" The file lacks {len(missing)} of the network's weights, first {missing[0]}: "
            "what is in their place is by chance, as with ComfyUI's own loader."
        )
    return Chosen(file, why)


def _recognise(path: Path) -> HostFile:
    from parallel_runtime.loading.host_file import open_host_file

    if path.is_dir():
        raise UnsupportedModelError(
            f"{path} is a diffusers folder, and ComfyUI's own network is loaded from a file.",
            "Set network to auto or diffusers, or choose a .safetensors file.",
        )
    return open_host_file(path)
