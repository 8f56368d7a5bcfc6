"""Layers with quantised weights in a graph, against the same layers by themselves."""

from __future__ import annotations

import json
from typing import Any

import torch

from parallel_runtime.acceleration.compiled_methods import CompiledMethods
from parallel_runtime.networks.comfyui.comfy_code import use_comfyui
from parallel_runtime.networks.float8_layers import Float8Layer, float8_layer, float8_rows
from parallel_runtime.networks.int8_layers import Int8Layer, int8_rows
from parallel_runtime.networks.quantised_layers import QuantisedLayer, hide_quantised, int8_layer, to_float8
from parallel_runtime.networks.traced import TRACED
from parallel_runtime.replaced import replaced

FORMATS = {
    "float8_e4m3fn": {},
    "float8_e4m3fn, scaled input": {},
    "int8_tensorwise": {},
    "int8_tensorwise, rotated": {"convrot": True, "convrot_groupsize": 16},
    "int8_tensorwise, activated": {},
    "int8_tensorwise, activated and added": {},
    "int8_tensorwise, of a time to come": {},
    "int8_tensorwise, through the host": {},
    "fp8_ops": {},
}


class Two(torch.nn.Module):
    """Two layers with a GELU in between."""

    def __init__(self, layers: list[torch.nn.Module]):
        super().__init__()
        self.first, self.second = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, 32) -> the same."""
        return self.second(torch.nn.functional.gelu(self.first(x)))


class Activated(Two):
    """The same, with ComfyUI's own function for a GELU and the layer behind it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, 32) -> the same."""
        import comfy.ops

        return comfy.ops.linear_input_act(self.second, self.first(x), "gelu_tanh")


class Added(Two):
    """The same as newer ComfyUIs' blocks have it: normed, scaled, and added to what came in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, 32) -> the same."""
        import comfy.ops

        weight, scale = (torch.full((x.shape[-1],), each, dtype=x.dtype) for each in (0.5, 0.25))
        act: Any = comfy.ops.linear_input_act
        made = act(self.first, x, "rms_norm", weight, 0.5)
        return act(self.second, made, None, residual=x, residual_scale=scale)


class ToCome(Two):
    """With an argument that nobody knows yet."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, 32) -> the same."""
        import comfy.ops

        return comfy.ops.linear_input_act(self.second, self.first(x), "gelu_tanh", times=3.0)


def _newer() -> Any:
    """This ComfyUI's function with the arguments that newer ones give it, and one more."""
    import comfy.ops

    older: Any = comfy.ops.linear_input_act

    def linear_input_act(
        linear: Any, x: Any, input_act: str | None, act_weight: Any = None, act_eps: float = 0.0, residual: Any = None,
        residual_scale: Any = None, times: float = 1.0,
    ) -> torch.Tensor:  # fmt: skip
        if input_act == "rms_norm":
            made = linear(torch.nn.functional.rms_norm(x, x.shape[-1:], act_weight, act_eps))
        elif input_act is None:
            made = linear(x)
        else:
            made = older(linear, x, input_act) * times
        return made if residual is None else torch.addcmul(residual, made, residual_scale)

    return linear_input_act


def compare(rank: int, world_size: int, comfyui: str) -> dict[str, Any]:
    """{format: {"differences": largest over the scale, as it is, again with other weights, with patches in place and as
    before, with a function on a weight, "operators": of the first graph, "graphs", "graphs of patches", "quantised":
    how many layers are}}."""
    use_comfyui(comfyui, {"cpu": True})
    torch.set_grad_enabled(False)
    import comfy.ops

    own = comfy.ops.linear_input_act = _newer()
    found = {}
    for name, more in FORMATS.items():
        with replaced(TRACED, "through_host", "host" in name):
            found[name] = _compare(name, more, own)
    return found


def _compare(name: str, more: dict[str, Any], own: Any) -> dict[str, Any]:
    import comfy.ops

    torch._dynamo.reset()
    torch.manual_seed(0)
    operations = comfy.ops.mixed_precision_ops({}, torch.bfloat16)
    kinds = {"added": Added, "activated": Activated, "to come": ToCome}
    kind = next((each for word, each in kinds.items() if word in name), Two)
    blocks = [kind([_layer(operations, name, more, shape) for shape in ((64, 32), (32, 64))]) for _ in range(2)]
    graphs: list[list[str]] = []

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in module.graph.nodes if "parallel_dit" in str(node.target)])
        return module.forward

    methods = CompiledMethods(plain=True, backend=backend)  # type: ignore[arg-type]

    def differ(block: Two, tokens: int = 5) -> float:
        # ComfyUI's code for CPUs multiplies by a scale in the type that it is given.
        x = torch.randn(2, tokens, 32).to(torch.float32 if "scaled" in name else torch.bfloat16)
        with replaced(comfy.ops, "linear_input_act", own):
            expected = block(x)
        for layer in block.modules():
            if isinstance(layer, QuantisedLayer):
                layer.look_inside()
        with methods.compiling():
            found = methods.call(block.forward, (x,), {}, lambda args, kwargs: [(args, 1)], lambda: True)
        return float((found - expected).abs().max() / expected.abs().max())

    for block in blocks:
        hide_quantised(block)
    before = len(graphs)
    differences = [differ(blocks[0]), differ(blocks[1], tokens=7)]
    made = len(graphs) - before
    blocks[0].first.weight = blocks[1].first.weight
    differences.append(differ(blocks[0]))
    patched = blocks[0].second.weight  # as on a GPU: in place, and then as it was
    original = patched.detach().clone()
    for other in (blocks[1].second.weight, original):
        patched.copy_(other)
        differences.append(differ(blocks[0]))
    made_by_patches = len(graphs) - before - made
    if name != "fp8_ops":
        blocks[0].first.weight_function = [lambda weight: weight * 2]
        differences.append(differ(blocks[0]))
        blocks[0].first.weight_function = []
        differences.append(differ(blocks[0]))
    return {
        "differences": differences,
        "graphs": made,
        "graphs of patches": made_by_patches,
        "operators": graphs[0] if graphs else [],
        "refused": list(methods.refused.values()),
        "quantised": sum(isinstance(each, QuantisedLayer) for block in blocks for each in block.children()),
    }


IN_FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "float8": ("float8_e4m3fn", {}),
    "scaled float8": ("float8_e4m3fn, scaled input", {}),
    "int8": ("int8_tensorwise", {}),
    "rotated int8": ("int8_tensorwise", {"convrot": True, "convrot_groupsize": 16}),
}
"""Formats of layers that are known row by row: ComfyUI's name, and what else a file says."""


def in_format(module: torch.nn.Module, format: str) -> None:
    """Make layers of a format of all linear ones inside whose inputs it can take, with other weights."""
    import comfy.ops

    operations = comfy.ops.mixed_precision_ops({}, torch.float32)
    kind, more = IN_FORMATS[format]
    for name, child in list(module.named_children()):
        if not isinstance(child, torch.nn.Linear):
            in_format(child, format)
        elif child.in_features % more.get("convrot_groupsize", 1) == 0:
            made = _layer(operations, kind, more, tuple(child.weight.shape))
            made.bias = None if child.bias is None else torch.nn.Parameter(made.bias.float(), requires_grad=False)
            setattr(module, name, made)


def compare_rows(rank: int, world_size: int, comfyui: str) -> dict[str, dict[str, bool]]:
    """Of each format, whether some rows of a layer's output (of int8 for some tokens alone) are those of all, bit for
    bit, of int8 as other ranks get the input to rounding; and that there was something."""
    use_comfyui(comfyui, {"cpu": True})
    torch.set_grad_enabled(False)
    found = {}
    for format in IN_FORMATS:
        torch.manual_seed(0)
        holder = torch.nn.ModuleDict({"layer": torch.nn.Linear(32, 96)})
        in_format(holder, format)
        hide_quantised(holder)
        layer: Any = holder["layer"]
        layer.look_inside()
        x = torch.randn(2, 5, 32)
        given = x
        if "float8" in format:
            x = to_float8(x, layer.scale)
            given = x if layer.scale is None else x.float() * layer.scale
            whole = float8_layer(x, layer.inside, layer.kind, torch.float32)
            parts: Any = Float8Layer(layer.inside, layer.kind, torch.float32)
            last = float8_rows(x, layer.inside, layer.kind, torch.float32, 32, 64)
        else:
            whole, parts = int8_layer(x, layer.inside, layer.kind), Int8Layer(layer.inside, layer.kind, x.dtype)
            last = int8_rows(x, layer.inside, layer.kind, 32, 64)
            sent = parts.rounding.sent(x)
            came = parts.rows(8, 48, rounded=True)(parts.rounding.taken(sent))
            found["sent " + format] = {
                "alike": bool((came - whole[..., 8:56]).abs().max() < 1e-6 * whole.abs().max()),
                "less": sent.shape == (2, 5, 36) and sent.itemsize == 1,
                "none": parts.rounding.sent(x[:, :0]).shape == (2, 0, 36),
            }
        # Of int8 sums are exact, so that other tokens beside them change no bit.
        some = torch.cat([parts.rows(8, 48)(each) for each in x.split((1, 4) if "int8" in format else 5, 1)], 1)
        found[format] = {
            "alike": torch.equal(some, whole[..., 8:56]) and torch.equal(last, whole[..., 32:]),
            "large": bool(whole.abs().mean() > 0.1),
            "as it is": torch.equal(whole, layer(given.float())),
            "known": layer.rounds == ("float8" in format) != layer.by_tokens,
        }
    return found


def _layer(operations: Any, name: str, more: dict[str, Any], shape: tuple[int, int]) -> torch.nn.Module:
    import comfy.ops
    import comfy.quant_ops as quant

    weight, bias = torch.randn(shape).to(torch.bfloat16) / 8, torch.randn(shape[0]).to(torch.bfloat16)
    if name == "fp8_ops":
        layer = comfy.ops.fp8_ops.Linear(shape[1], shape[0], dtype=torch.float8_e4m3fn)
        layer.load_state_dict({"weight": weight.to(torch.float8_e4m3fn), "bias": bias.to(torch.float8_e4m3fn)})
        layer.comfy_cast_weights = True
        return layer
    kind = name.partition(",")[0]
    layout = quant.QUANT_ALGOS[kind]["comfy_tensor_layout"]
    options = {"per_channel": True, **more} if more else {}
    tensors = quant.QuantizedTensor.from_float(weight, layout, scale="recalculate", **options).state_dict("weight")
    said = torch.tensor(list(json.dumps({"format": kind, **more}).encode()), dtype=torch.uint8)
    tensors |= {"bias": bias, "comfy_quant": said}
    if "scaled input" in name:
        tensors["input_scale"] = 0.01 + 0.02 * torch.rand(())
    layer = operations.Linear(shape[1], shape[0])
    layer.load_state_dict(tensors)
    return layer
