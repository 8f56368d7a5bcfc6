"""ControlNets that read weights of the model or run its layers, beside a network without weights: in a rank's process.

A file of these families has gigabytes at any depth, so its reading is replaced by a tiny network.
"""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from parallel_runtime.networks.comfyui.comfy_code import use_comfyui
from parallel_runtime.networks.tables.comfyui import find_network
from parallel_runtime.patching.comfyui_patches import decode_patches
from parallel_runtime.patching.patch_data import UNPATCHED, Encoder, WeightPatches


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
    whole, twin, reading, source = _pair(QwenImageTransformer2DModel, width)
    call = {
        "x": noise(2, 16, 1, 8, 12), "timesteps": torch.tensor([0.7, 0.7]), "context": noise(2, 9, 48),
        "hint": noise(2, 16, 1, 8, 12, seed=8),
    }  # fmt: skip
    with reading as read:
        found, again = (net(**call, base_model=twin)["input"][0] for _ in range(2))
        plain = net(**call, base_model=whole)["input"][0]
        distances = [float((each - plain).abs().max()) for each in (found, again)]
        # A LoRA beside a layer, in a layer's weight, and off again: each as in ComfyUI's, whose weights are patched.
        for given in (_lora("img_in", 64, 256), _lora("txt_in", 48, 256), UNPATCHED):
            source.patches = given
            found = net(**call, base_model=twin)["input"][0]
            wanted = net(**call, base_model=_patched(whole, given))["input"][0]
            assert (given is UNPATCHED) == torch.equal(wanted, plain)
            distances.append(float((found - wanted).abs().max()))
        source.patches = _beside("img_in", 64, 256)
        found = net(**call, base_model=twin)["input"][0]
        wanted = net(**call, base_model=_patched(whole, _lora("img_in", 64, 256)))["input"][0]
        distances.append(float((found - wanted).abs().max()))
        assert read.call_count == 1
    return max(distances)


def _embedders() -> float:
    from comfy.ldm.modules.diffusionmodules.mmdit import OpenAISignatureMMDITWrapper

    whole, twin, reading, source = _pair(
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
    distances = []
    for given in (UNPATCHED, _lora("y_embedder.mlp.0", 12, 128)):
        source.patches = given
        wanted = _patched(whole, given)
        with reading:
            distances += [
                float((getattr(twin, part).state_dict()[name] - tensor).abs().max())
                for part in ("y_embedder", "x_embedder")
                for name, tensor in getattr(wanted, part).state_dict().items()
            ]
    return max(distances)


class _Now:
    """What is asked of the weights."""

    patches = UNPATCHED


def _adapter(inputs: int, outputs: int) -> Any:
    from comfy.weight_adapter import LoRAAdapter

    generator = torch.Generator().manual_seed(5)
    up, down = (torch.randn(shape, generator=generator) * 0.3 for shape in ((outputs, 4), (4, inputs)))
    return LoRAAdapter(set(), (up, down, 4.0, None, None, None))


def _lora(layer: str, inputs: int, outputs: int) -> WeightPatches:
    patches = {f"diffusion_model.{layer}.weight": [(0.7, _adapter(inputs, outputs), 1.0, None, None)]}
    return WeightPatches(Encoder().encode(patches))


def _beside(layer: str, inputs: int, outputs: int) -> WeightPatches:
    return WeightPatches(Encoder().encode({}, {f"diffusion_model.{layer}": (_adapter(inputs, outputs), 0.7)}))


def _patched(network: torch.nn.Module, given: WeightPatches) -> torch.nn.Module:
    """A copy, its weights as ComfyUI would have them."""
    import comfy.lora

    network = deepcopy(network)
    for name, patches in given.patches.weights.items():
        weight = network.get_parameter(name)
        decoded = decode_patches(patches, given.patches.factors)
        weight.data = comfy.lora.calculate_weight(decoded, weight.data.clone(), f"diffusion_model.{name}")
    return network


def _pair(network: Any, width: dict[str, Any]) -> tuple[torch.nn.Module, torch.nn.Module, Any, _Now]:
    """A network, one that is elsewhere, what has the first one's weights read as if from a file, and the LoRA."""
    from nodes import real_weights
    from tests.comfyui_networks.tiny import build

    whole, now = build(network, **width), _Now()
    twin = build(network, **width, operations=real_weights.operations_elsewhere(), device="meta")
    data = find_network(network)
    assert data is not None
    source = real_weights.Source(now, None)
    real_weights.give_weights(twin, source)
    real_weights.run_here(twin, data.run_outside, source)

    def load(*_: Any) -> Any:
        return SimpleNamespace(model=SimpleNamespace(diffusion_model=deepcopy(whole)))

    return whole, twin, mock.patch.object(real_weights.Source, "load", side_effect=load), now
