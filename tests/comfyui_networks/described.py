"""What plans reckon with of a network's weights, beside what its forward hands to its layers."""

from __future__ import annotations

from typing import Any

import torch

from parallel_runtime.engine.opened import Family
from parallel_runtime.networks.comfyui.comfy_code import use_comfyui
from parallel_runtime.networks.facts import describe_network
from parallel_runtime.requests.facts import FLOAT8, INT8, PLAIN, QUANTISED, Seen


def compare(rank: int, world_size: int, comfyui: str, names: list[str]) -> dict[str, float]:
    """{name: products of the blocks' linear layers that the facts say, over those of a forward}."""
    use_comfyui(comfyui, {"cpu": True})
    from tests.comfyui_networks.catalogue import TINY, call

    torch.set_grad_enabled(False)
    found = {}
    for name in names:
        made = TINY[name]()
        case, arguments = next(iter(made.calls.items()))
        x = arguments["x"]
        latents = tuple(tuple(each.shape) for each in (x if isinstance(x, list) else [x]))
        described = describe_network(made.network, 0, len(latents[0]) - 2)
        facts, context = described.facts, arguments["context"]
        family = Family(name, described.patch, described.rows_together)
        request = family.describe(Seen(tuple(context.shape), latents), batch=latents[0][0])
        seen = [0]

        def note(layer: Any, inputs: tuple[torch.Tensor, ...], *_: Any, seen: list[int] = seen) -> None:
            seen[0] += inputs[0].numel() // inputs[0].shape[-1] * layer.weight.numel()

        assert described.data is not None
        for blocks in described.data.blocks:
            for layer in made.network.get_submodule(blocks.path).modules():
                if isinstance(layer, torch.nn.Linear):
                    layer.register_forward_hook(note)
        call(made, case)
        told = request.tokens * facts.image_parameters + request.text_tokens * facts.text_parameters
        found[name] = latents[0][0] * told / seen[0]
    return found


def hiding(rank: int, world_size: int, comfyui: str, names: list[str]) -> dict[str, list[int]]:
    """{name: blocks whose exchange runs beside their feed-forward layer, and those that project, each of layers that
    take numbers as they are, float8, int8 and what they quantise}."""
    use_comfyui(comfyui, {"cpu": True})
    from tests.comfyui_networks.catalogue import TINY

    found = {}
    for name in names:
        network = TINY[name]().network
        facts = [describe_network(network, 0, 2, takes).facts for takes in (PLAIN, FLOAT8, INT8, QUANTISED)]
        found[name] = [[each.parallel_blocks for each in facts], [each.projecting_blocks for each in facts]]
    return found
