"""GGUF layers in a graph, against the pack's own class."""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch

from parallel_runtime.acceleration.compiled_methods import CompiledMethods
from parallel_runtime.networks.comfyui.comfy_code import use_comfyui
from parallel_runtime.networks.gguf_layers import GgufLayer, use_gguf_kernels

from .quantised import Two


def compare(rank: int, world_size: int, comfyui: str, pack: str, kinds: list[str]) -> dict[str, Any]:
    """{type of GGUF: {"alike": results of two blocks, and of one with a LoRA, are those of the blocks as they are,
    "graphs": of the blocks, and with the LoRA, "refused"}}; with the LoRA a graph holds the pack's own code."""
    use_comfyui(comfyui, {"cpu": True})
    import gguf
    from comfy.weight_adapter import LoRAAdapter

    from parallel_runtime.loading.gguf_pack import open_pack

    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    operations = open_pack(pack).operations()
    tensor: Any = sys.modules[operations.__module__].GGMLTensor
    found: dict[str, Any] = {}
    for name in kinds:
        torch._dynamo.reset()
        kind, plain = gguf.GGMLQuantizationType[name], gguf.GGMLQuantizationType.F32
        size, stored = gguf.GGML_QUANT_SIZES[kind]

        def layer(
            inputs: int, outputs: int, kind: Any = kind, plain: Any = plain, row: float = stored / size
        ) -> torch.nn.Module:
            # Bytes as they come, which the package cannot make of numbers in every type; scales among them are small.
            weight = torch.randint(0, 60, (outputs, int(inputs * row)), dtype=torch.uint8)
            parts = {"weight": (weight, kind, (outputs, inputs)), "bias": (torch.randn(outputs), plain, (outputs,))}
            made: torch.nn.Module = operations.Linear(inputs, outputs)
            made.load_state_dict(
                {
                    part: tensor(data, tensor_type=of, tensor_shape=torch.Size(shape))
                    for part, (data, of, shape) in parts.items()
                }
            )
            return made

        graphs: list[Any] = []
        methods = CompiledMethods(
            plain=True, backend=lambda module, inputs, graphs=graphs: graphs.append(module) or module
        )  # type: ignore[arg-type,misc]
        blocks = [Two([layer(256, 512), layer(512, 256)]) for _ in range(2)]
        # Of the same parameters, by the pack's own class.
        packs = [Two([copy.copy(block.first), copy.copy(block.second)]) for block in blocks]
        for block in blocks:
            use_gguf_kernels(block)

        def alike(block: Two, methods: CompiledMethods = methods, packs: Any = packs, ours: Any = blocks) -> bool:
            x = torch.randn(2, 5, 256).to(torch.bfloat16)
            for each in block.modules():
                if isinstance(each, GgufLayer):
                    each.look_inside()
            with methods.compiling():
                output = methods.call(block.forward, (x,), {}, lambda args, kwargs: [], lambda: True)
            expected = packs[ours.index(block)](x)
            same = torch.equal(output, expected) and torch.equal(block(x), expected)
            return same and bool(output.isfinite().all())

        results, made = [alike(block) for block in blocks], [len(graphs)]
        lora = LoRAAdapter(set(), (torch.randn(512, 4), torch.randn(4, 256), None, None, None, None))
        first = blocks[0].first
        patched = tensor(
            first.weight,
            tensor_type=first.weight.tensor_type,
            tensor_shape=first.weight.tensor_shape,
            patches=[([(1.0, lora, 1.0, None, None)], "first.weight")],
        )
        before = first(torch.ones(256))
        first.weight = torch.nn.Parameter(patched, requires_grad=False)
        assert not torch.equal(first(torch.ones(256)), before)
        results.append(alike(blocks[0]))
        found[name] = {"alike": results, "graphs": [*made, len(graphs)], "refused": list(methods.refused.values())}
    return found
