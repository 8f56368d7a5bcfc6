"""ControlNets that read weights of the model or run its layers, beside a network without weights: in a rank's process.

A file of these families has gigabytes at any depth, so its reading is replaced by a tiny network.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from parallel_runtime.networks.comfyui.host_code import use_comfyui
from parallel_runtime.networks.comfyui.networks import find_network


def agree(rank: int, world_size: int, comfyui: str) -> dict[str, float]:
    """What is read -> largest difference from what ComfyUI's own network gives."""
    use_comfyui(comfyui, {"cpu": True})
    torch.set_grad_enabled(False)
    return {"Qwen-Image Fun": _fun(), "SD3.5": _embedders()}


def _fun() -> float:
    from comfy.ldm.qwen_image.controlnet import QwenImageFunControlNetModel
    from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel

    from tests.comfyui_networks.tiny import build, noise

    width = {
        "patch_size": 2, "in_channels": 64, "out_channels": 16, "num_layers": 1, "attention_head_dim": 128,
        "num_attention_heads": 2, "joint_attention_dim": 48,
    }  # fmt: skip
    net = build(QwenImageFunControlNetModel, 132, 256, 2, 128, num_control_blocks=2, main_model_double=1)
    whole, twin, reading = _pair(QwenImageTransformer2DModel, width)
    call = {
        "x": noise(2, 16, 1, 8, 12), "timesteps": torch.tensor([0.7, 0.7]), "context": noise(2, 9, 48),
        "hint": noise(2, 16, 1, 8, 12, seed=8),
    }  # fmt: skip
    with reading as read:
        found = net(**call, base_model=twin)["input"][0]
        net(**call, base_model=twin)
        assert read.call_count == 1
    return float((found - net(**call, base_model=whole)["input"][0]).abs().max())


def _embedders() -> float:
    from comfy.ldm.modules.diffusionmodules.mmdit import OpenAISignatureMMDITWrapper

    whole, twin, reading = _pair(
        OpenAISignatureMMDITWrapper,
        {
            "input_size": None, "patch_size": 2, "in_channels": 16, "depth": 2, "adm_in_channels": 12,
            "num_patches": 64,
            "context_embedder_config": {
                "target": "torch.nn.Linear", "params": {"in_features": 24, "out_features": 128},
            },
            "pos_embed_max_size": 8, "qk_norm": "rms",
        },
    )  # fmt: skip
    with reading:
        return max(
            float((getattr(twin, part).state_dict()[name] - tensor).abs().max())
            for part in ("y_embedder", "x_embedder")
            for name, tensor in getattr(whole, part).state_dict().items()
        )


def _pair(network: Any, width: dict[str, Any]) -> tuple[torch.nn.Module, torch.nn.Module, Any]:
    """A network, one that is elsewhere, and what has the first one's weights read as if from a file."""
    from nodes import real_weights
    from tests.comfyui_networks.tiny import build

    whole = build(network, **width)
    twin = build(network, **width, operations=real_weights.operations_elsewhere(), device="meta")
    data = find_network(network)
    assert data is not None
    real_weights.give_weights(twin, lambda: "a file", None)
    real_weights.LayersHere(data.run_outside, lambda: "a file", None).put_into(twin)
    loaded = SimpleNamespace(model=SimpleNamespace(diffusion_model=whole))
    return whole, twin, mock.patch.object(real_weights, "load_here", return_value=loaded)
