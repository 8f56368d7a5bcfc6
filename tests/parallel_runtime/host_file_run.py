"""What a process with ComfyUI says of files, for test_host_file.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from parallel_runtime.errors import ParallelError
from parallel_runtime.loading.host_file import open_host_file
from parallel_runtime.networks.comfyui.comfy_code import use_comfyui
from parallel_runtime.networks.facts import describe_network
from tests.comfyui_networks.formats import write


def look_at(rank: int, world_size: int, comfyui: str, files: list[str]) -> dict[str, list[str]]:
    """{"said": of each file, what it is, or why it is refused}."""
    use_comfyui(comfyui, {"cpu": True})

    def describe(path: str) -> str:
        file = open_host_file(path)
        described = describe_network(file.build(), file.size, file.config.latent_format.latent_dimensions)
        real = sum(not tensor.is_meta for tensor in file.state_dict.values()) > 0
        facts = described.facts
        return f"{facts.title} {facts.heads} {described.patch} {len(facts.block_sizes)} {file.stored} {real}"

    return {"said": [_said(describe, path) for path in files]}


def take(rank: int, world_size: int, comfyui: str, files: list[str]) -> dict[str, list[str]]:
    """{"said": for each file "PATH FORMAT", what its layers take; it is written here, of the first file's tensors in
    this format."""
    use_comfyui(comfyui, {"cpu": True})
    source, *named = files
    said = []
    for path, kind in (each.rsplit(" ", 1) for each in named):
        tensors = {name: each.to(torch.bfloat16) for name, each in load_file(source).items()}
        written = tensors if kind == "bfloat16" else write(tensors, kind.removesuffix("+input"))
        save_file(written | _scales(tensors, kind), path)
        said.append(open_host_file(path).takes)
    return {"said": said}


def _scales(tensors: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """Given scales of inputs."""
    layers = [name.removesuffix(".weight") for name in tensors if name.endswith("qkv.weight")]
    return {f"{layer}.input_scale": torch.tensor(0.5) for layer in layers if kind.endswith("+input")}


def build_streamed(rank: int, world_size: int, comfyui: str, files: list[str]) -> dict[str, list[str]]:
    """{"said": whether a network has the same weights where ComfyUI streams them, and whether it does}."""
    use_comfyui(comfyui, {"cpu": True})
    import comfy.memory_management
    import comfy.ops

    file = open_host_file(files[0])
    file.config.custom_operations = comfy.ops.disable_weight_init
    names = list(file.build_model().state_dict())
    comfy.memory_management.aimdo_enabled = True  # as main.py sets it on a GPU
    same = names == list(file.build_model().state_dict())
    return {"said": [f"{same} {comfy.memory_management.aimdo_enabled}"]}


def look_at_wrong_ones(rank: int, world_size: int, comfyui: str, files: list[str]) -> dict[str, list[str]]:
    """{"said": of a whole file, one with a weight of another shape, a strange one, the whole one, one that lacks a
    weight, the whole one in a newer ComfyUI, and in one with a pack's own model}."""
    use_comfyui(comfyui, {"cpu": True})
    import comfy.ldm.flux.model as flux
    import comfy.supported_models

    from nodes.model_files import open_model_file
    from parallel_runtime.loading.comfyui_network import NetworkReader
    from parallel_runtime.loading.reading import ignore

    whole, misshapen, strange, lacking = files

    def describe(path: str) -> str:
        file = open_host_file(path)
        described = describe_network(file.build(), file.size, 2)
        return f"{described.facts.splits_sequence} {described.facts.title} {described.facts.why_whole}"

    def load(path: str) -> Any:
        return NetworkReader(open_host_file(path), None, torch.float32).open(ignore)

    found = [_said(describe, whole), _said(load, misshapen), _said(lambda path: open_model_file(Path(path)), strange)]
    found += [open_model_file(Path(path))[1] for path in (whole, lacking)]

    class Newer(flux.DoubleStreamBlock):
        def forward(self, img: Any, txt: Any, vec: Any, pe: Any, registers: Any = None) -> Any:
            return super().forward(img, txt, vec, pe)

    own, flux.DoubleStreamBlock = flux.DoubleStreamBlock, Newer
    found.append(_said(describe, whole))
    flux.DoubleStreamBlock = own

    class TheirModel(comfy.supported_models.Flux):
        pass

    TheirModel.__qualname__ = "TheirModel"
    TheirModel.__module__ = "/home/me/ComfyUI/custom_nodes/other_pack/models"
    comfy.supported_models.models.insert(0, TheirModel)
    found.append(_said(lambda path: open_model_file(Path(path)), whole))
    return {"said": found}


def _said(run: Callable[[str], Any], path: str) -> str:
    """What comes of a file, or the error's name and cause."""
    try:
        return str(run(path))
    except ParallelError as error:
        return f"{type(error).__name__} {error.cause}".replace("\n", " ")


SDXL = {
    "use_checkpoint": False, "image_size": 32, "out_channels": 4, "use_spatial_transformer": True, "legacy": False,
    "num_classes": "sequential", "adm_in_channels": 2816, "in_channels": 4, "model_channels": 320,
    "num_res_blocks": [2, 2, 2], "transformer_depth": [0, 0, 2, 2, 10, 10], "channel_mult": [1, 2, 4],
    "transformer_depth_middle": 10, "use_linear_in_transformer": True, "context_dim": 2048, "num_head_channels": 64,
    "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10],
    "use_temporal_attention": False, "use_temporal_resblock": False,
}  # fmt: skip


def look_at_sdxl_in_names_of_diffusers(rank: int, world_size: int, comfyui: str, files: list[str]) -> dict[str, Any]:
    """{"said": what the file is, weights that it lacks, those that a rank's network has}; the file is written here, of
    zeros that take no place on the disk."""
    use_comfyui(comfyui, {"cpu": True})
    import comfy.ops
    import comfy.utils
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    from nodes.model_files import open_model_file
    from parallel_runtime.loading.comfyui_network import NetworkReader
    from parallel_runtime.loading.reading import ignore

    own = UNetModel(**SDXL, device="meta", dtype=torch.float16, operations=comfy.ops.disable_weight_init).state_dict()
    end, header = 0, {}
    for theirs, name in comfy.utils.unet_to_diffusers(SDXL).items():
        if name in own:
            begin, end = end, end + own[name].nbytes
            header[theirs] = {"dtype": "F16", "shape": list(own[name].shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with Path(files[0]).open("wb") as written:
        written.write(len(text).to_bytes(8, "little") + text)
        written.truncate(8 + len(text) + end)
    file, why = open_model_file(Path(files[0]))
    network, _ = NetworkReader(file, None, torch.float16).open(ignore)
    return {"said": [type(file.config).__name__, str(why), str(network.state_dict().keys() == own.keys())]}
