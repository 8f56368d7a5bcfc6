"""What a rank does for the tests of U-Nets: calls of ComfyUI's, and of the same with channels side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from parallel_runtime.config import COMFYUIS, ParallelConfig
from parallel_runtime.engine.engine import Engine
from parallel_runtime.mesh.mesh import single_rank_mesh
from parallel_runtime.networks.comfyui import comfy_network
from parallel_runtime.networks.comfyui.comfy_code import use_comfyui
from parallel_runtime.networks.comfyui.comfy_network import ComfyNetwork
from parallel_runtime.networks.diffusers.sdxl import SDXL
from parallel_runtime.networks.facts import describe_network
from parallel_runtime.networks.token_split import TokenSplit
from parallel_runtime.requests.comfyui_code import ComfyuiCode
from parallel_runtime.requests.patches import CARRIED, PATCHES, Patch
from parallel_runtime.requests.requests import Load
from tests.comfyui_networks.batch_alone import BATCH, _svd
from tests.comfyui_networks.compiled import as_held, run_call
from tests.comfyui_vaes import plain_kernels
from tests.comfyui_vaes.ranks import as_on_a_gpu
from tests.parallel_runtime.staged_run import Quiet
from tests.tiny_model import write_original
from tests.tiny_sdxl import recognised_config


def compare(rank: int, world_size: int, comfyui: str) -> dict[str, Any]:
    """{U-Net: {"difference": from its own forward, over the scale; "kernels": that ran}}, of SD 1.5's kind, SDXL's and
    SVD's; {"as it is": kernels that ran where functions of nodes act, attention is ComfyUI's or nothing is compiled}.
    """
    use_comfyui(comfyui, {"cpu": True})
    from tests.comfyui_networks.tiny import noise

    torch.set_grad_enabled(False)
    video = _svd()
    calls = {name: {"x": noise(2, 4, 8, 6), "context": noise(2, 7, 24), **more} for name, more in (
        ("convolutions", {}), ("products", {"y": noise(2, 48)}),
    )}  # fmt: skip
    calls["video"] = {"x": noise(*video.x), **video.conditioning(1)}
    found: dict[str, Any] = {}
    for name, network in (
        ("convolutions", unet(False)),
        ("products", unet(True, num_classes="sequential", adm_in_channels=48)),
        ("video", video.network),
    ):
        call = {**calls[name], "timestep": torch.full((BATCH if name == "video" else 2,), 300.0)}
        wanted = run_call(run_as(network), single_rank_mesh(), call)
        with as_on_a_gpu(), mock.patch.object(comfy_network, "usable", return_value=True):
            plain_kernels.calls.clear()
            made = run_call(run_as(network, compile=True), single_rank_mesh(), call)
            kernels = [f"{kernel}{' and SiLU' if silu else ''}" for kernel, silu in plain_kernels.calls]
            assert made.is_contiguous()
            difference = float((made - wanted).abs().max() / wanted.abs().max())
            found[name] = {"difference": difference, "kernels": sorted(kernels)}
            plain_kernels.calls.clear()
            run_call(run_as(network), single_rank_mesh(), call)
            run_call(run_as(network, compile=True, attention=COMFYUIS), single_rank_mesh(), call)
            free_u = Patch("comfy_extras.nodes_freelunch:FreeU.execute.<locals>.output_block_patch", 0)
            options = {"transformer_options": {CARRIED: {PATCHES: {"output_block_patch": [free_u]}}}}
            with mock.patch.object(comfy_network.LivePatches, "put_in", return_value={}):
                run_call(run_as(network, compile=True), single_rank_mesh(), {**call, **options})
            found["as it is"] = [*found.get("as it is", ()), *map(str, plain_kernels.calls)]
    return found


def loaded(rank: int, world_size: int, comfyui: str, path: str) -> dict[str, bool]:
    """{"on" or "off", as `compile` says: whether a file's network has channels side by side in a pool}."""
    write_original(SDXL, Path(path), recognised_config())
    engine, found = Engine(torch.device("cpu"), rank, world_size), {}
    for compile in ("on", "off"):
        config = ParallelConfig(devices="cpu:1", compile=compile).to_mapping()
        code = ComfyuiCode(comfyui, {"cpu": True}, "float32", False)
        engine.prepare(Load(compile, path, "float32", config, 1, comfyui=code), {}, Quiet()).run({}, Quiet())
        found[compile] = engine.residency.get(compile).network._side_by_side
    return found


def unet(linear: bool, **more: Any) -> nn.Module:
    """Small, of two resolutions."""
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    from tests.comfyui_networks.tiny import build

    return build(
        UNetModel, image_size=32, in_channels=4, out_channels=4, model_channels=32, num_res_blocks=[1, 1],
        channel_mult=[1, 2], num_head_channels=16, transformer_depth=[1, 1], transformer_depth_output=[1, 1, 1, 1],
        transformer_depth_middle=1, use_spatial_transformer=True, use_linear_in_transformer=linear, context_dim=24,
        legacy=False, **more,
    )  # fmt: skip


def run_as(network: nn.Module, compile: bool = False, attention: str = "auto") -> ComfyNetwork:
    """The network as a rank runs it."""
    described = describe_network(network, 0, 2)
    held = as_held(mock.Mock(network=network), described, TokenSplit(single_rank_mesh()))
    return ComfyNetwork(held, described, None, attention, torch.float32, compile=compile)
