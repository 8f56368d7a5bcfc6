"""Layers with quantised weights as operators over plain tensors, so that a compiled block can hold them.

ComfyUI's quantised weights are tensors with tensors in them, which PyTorch's compiler traces in some versions alone. A
graph sees the tensors inside and one operator, in which ComfyUI's own forward computes: the numbers are its own. Of
float8 the rounding of the input is left in the graph, where it joins what comes before."""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

import torch
from torch import nn

from ..attention import operators
from ..switches import is_on
from .traced import TRACED

_QUANTISED = "QuantizedTensor"
_ROUNDING_INSIDE = "fp8_ops"  # ComfyUI's operations whose layers make quantised tensors of plain ones in their forward
_FLOAT8, _MOST = "TensorCoreFP8E4M3Layout", 448.0
_INT8 = "TensorWiseINT8Layout"
_FUNCTIONS = ("weight_function", "bias_function")
_NOT_OF_KIND = {"seed_key"}  # attributes of a layer that do not change what its forward does

Given = torch.Tensor | None
KINDS: dict[str, _Emptied] = {}  # a layer without its weights for each description


def whole_products() -> Any:
    """Inside, a product reaches quantised tensors whole, as in ComfyUI's inference mode. With autograd's keys PyTorch
    takes it apart first, and what layouts make of the parts rounds otherwise: int8 leaves some inputs unrounded."""
    return torch._C._AutoDispatchBelowAutograd()


class QuantisedLayer(nn.Module):
    """A layer becomes one by its class alone, of which its own class stays a base: weights and their names stay."""

    inside: tuple[torch.Tensor, ...] = ()  # plain tensors of its parameters; () where they are not known
    kind = ""  # description of all that is no tensor; a key of the layers that operators put together
    rounds = False  # its input is rounded to float8, as it is or by a scale that is in the file
    scale: Given = None  # that one
    by_tokens = False  # its input is rounded to int8 with a scale for each token, which gives the same in any company
    _seen: tuple[Any, ...] = ()

    def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As its own class's; in a graph one operator."""
        if torch.compiler.is_compiling() and self.kind and not args and not kwargs:
            ours = torch.ops.parallel_dit
            if self.rounds:
                return ours.float8_layer.default(to_float8(input, self.scale), self.inside, self.kind, input.dtype)
            if self.by_tokens and TRACED.through_host:
                return ours.int8_layer.default(input, self.inside, self.kind)
            return ours.quantised_layer.default(input, self.inside, self.kind)
        if torch.compiler.is_compiling():
            return super().forward(input, *args, **kwargs)
        with whole_products():
            return super().forward(input, *args, **kwargs)

    def look_inside(self) -> None:
        """See what the parameters consist of now; before a graph is called."""
        parameters = self._parameters
        parts = ("_qdata", "_params")
        seen = tuple(part for each in parameters.values() for part in (each, *(getattr(each, n, None) for n in parts)))
        functions = sum(len(getattr(self, name, ())) for name in _FUNCTIONS)
        known = len(seen) == len(self._seen) and all(map(operator.is_, seen, self._seen))
        if known and bool(functions) != bool(self.kind):
            return
        self._seen = seen
        if functions:  # they change weights at each call
            self.inside, self.kind = (), ""
            return
        inside: list[torch.Tensor] = []
        described: list[Any] = []
        for name, each in parameters.items():
            if each is None:
                described.append((name, None))
            elif type(each).__name__ == _QUANTISED:
                names, about = each.__tensor_flatten__()  # type: ignore[attr-defined]
                inside += [getattr(each, inner) for inner in names]
                described.append((name, type(each), tuple(names), about, tuple(each.shape), each.stride()))
            else:
                inside.append(each.data)
                described.append((name, 1))
        told = {name: value for name, value in vars(self).items() if isinstance(value, bool | int | str | None)}
        told = {name: told[name] for name in sorted(told.keys() - _NOT_OF_KIND - vars(QuantisedLayer).keys())}
        self.inside = tuple(inside)
        self.kind = repr((own_class(self, QuantisedLayer).__qualname__, told, described))
        self.rounds, self.by_tokens = (self._multiplies(parameters, layout) for layout in (_FLOAT8, _INT8))
        self.scale = scale_of(self)
        if self.kind not in KINDS:
            KINDS[self.kind] = _Emptied(self, described)

    def _multiplies(self, parameters: Any, layout: str) -> bool:
        """Whether it multiplies in this type of weights what it rounds."""
        weight = parameters.get("weight")
        if type(weight).__name__ != _QUANTISED or not weight._layout_cls == getattr(self, "layout_type", "") == layout:
            return False
        if getattr(self, "_full_precision_mm", True) or getattr(self, "comfy_force_cast_weights", False):
            return False
        return getattr(self, "pre_quant_scale", None) is None


class _Emptied:
    """A layer without its weights, and how its parameters are put together."""

    def __init__(self, layer: QuantisedLayer, described: list[Any]):
        self.by_tokens = layer.by_tokens
        self.own = own_class(layer, QuantisedLayer)
        self.outputs = int(layer.out_features)  # type: ignore[arg-type]
        self._described = described
        left_out = {*vars(QuantisedLayer), "_parameters", "ready"}
        self._kept = {name: value for name, value in vars(layer).items() if name not in left_out}

    def filled(self, inside: Any) -> Any:
        """The layer with these tensors."""
        left = iter(inside)
        parameters: dict[str, Any] = {}
        for name, *how in self._described:
            if how[0] is None:
                parameters[name] = None
            elif how[0] == 1:
                parameters[name] = next(left)
            else:
                kind, names, about, shape, stride = how
                parameters[name] = kind.__tensor_unflatten__({each: next(left) for each in names}, about, shape, stride)
        layer = self.own.__new__(self.own)
        vars(layer).update(self._kept, _parameters=parameters)
        return layer


def to_float8(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """As a layer of that scale rounds its input: bit for bit what ComfyUI's kernel for CUDA does."""
    x = x if scale is None else x.float() * (1 / scale)
    return x.clamp(-_MOST, _MOST).to(torch.float8_e4m3fn)


def scale_of(layer: Any) -> torch.Tensor | None:
    """That of a layer's input in its file."""
    scale = getattr(layer, "input_scale", None)
    return None if scale is None else scale.data


def some_rows(layer: Any, first: int, size: int) -> Any:
    """A layer that was `filled`, with so many rows of its weight from one on, as they lie there."""
    weight, bias, used = layer.weight, layer.bias, slice(first, first + size)
    rows = weight._qdata.view(torch.uint8)[used].view(weight._qdata.dtype)
    scale = weight._params.scale
    scale = scale[used] if scale.ndim and scale.shape[0] == weight.shape[0] else scale
    params = dataclasses.replace(weight._params, scale=scale, orig_shape=tuple(rows.shape))
    layer._parameters["weight"] = type(weight)(rows, weight._layout_cls, params)
    layer._parameters["bias"] = None if bias is None else bias[used]
    return layer


def hide_quantised(network: nn.Module) -> None:
    """Make graphs of this network's blocks hold operators where layers have quantised weights."""
    for module in network.modules() if is_on("quantised") else ():
        quantised = any(type(each).__name__ == _QUANTISED for each in module._parameters.values())
        if getattr(module, "out_features", None) is not None and (quantised or rounds_inside(type(module))):
            become(module, QuantisedLayer)
            _activated()


@functools.cache
def _activated() -> Any:
    """ComfyUI's own function for a product with an activation before it, which now is an operator, too; or None."""
    import comfy.ops

    own: Any = getattr(comfy.ops, "linear_input_act", None)

    def linear_input_act(
        linear: nn.Module, x: torch.Tensor, input_act: str | None, act_weight: Given = None, act_eps: float = 0.0,
        residual: Given = None, residual_scale: Given = None, **more: Any,
    ) -> torch.Tensor:  # fmt: skip
        # 0.33 gives the first three; what newer ones than were read have in `more` no operator knows.
        if torch.compiler.is_compiling() and isinstance(linear, QuantisedLayer) and linear.kind and not more:
            layer = x, linear.inside, linear.kind, input_act or ""
            return torch.ops.parallel_dit.activated_layer.default(*layer, act_weight, act_eps, residual, residual_scale)
        return own(linear, x, input_act, **_given(act_weight, act_eps, residual, residual_scale), **more)

    if own is not None:
        comfy.ops.linear_input_act = linear_input_act
    return own


def _given(weight: Given, eps: float, residual: Given, scale: Given) -> dict[str, Any]:
    """Of the arguments that only newer ComfyUIs have, those that were given."""
    tensors = {"act_weight": weight, "residual": residual, "residual_scale": scale}
    given: dict[str, Any] = {name: each for name, each in tensors.items() if each is not None}
    return given | ({"act_eps": eps} if eps else {})


def rounds_inside(kind: Any) -> bool:
    """Layers of this class round what they are given to float8, and write into it."""
    return bool(kind.__qualname__.startswith(_ROUNDING_INSIDE))


@functools.cache
def joined(kind: Any, own: Any) -> Any:
    """The class of a layer of class `own` that becomes one of `kind`."""
    return type(own.__name__, (kind, own), {"__module__": own.__module__, "__qualname__": own.__qualname__})


def become(layer: Any, kind: Any) -> Any:
    """The layer, which is made one of `kind` by its class alone, of which its own class stays a base."""
    own: Any = type(layer)
    if not isinstance(layer, kind):
        layer.__class__ = joined(kind, own)
    return layer


def own_class(layer: nn.Module, kind: Any) -> Any:
    """The class that a layer had before."""
    kinds = type(layer).__mro__
    return kinds[kinds.index(kind) + 1]


@operators.operator("quantised_layer", "(Tensor x, Tensor[] inside, str kind) -> Tensor")
def quantised_layer(x: torch.Tensor, inside: list[torch.Tensor], kind: str) -> torch.Tensor:
    """What ComfyUI's layer gives; x (..., inputs) -> (..., outputs)."""
    emptied = KINDS[kind]
    if rounds_inside(emptied.own):  # and writes into what it is given
        x = x.clone()
    with whole_products():
        output: torch.Tensor = emptied.own.forward(emptied.filled(inside), x)
    return output.contiguous()


@operators.operator("int8_layer", "(Tensor x, Tensor[] inside, str kind) -> Tensor")
def int8_layer(x: torch.Tensor, inside: list[torch.Tensor], kind: str) -> torch.Tensor:
    """The same of a layer that gives a token's outputs by that token alone, which passes may know."""
    return torch.ops.parallel_dit.quantised_layer.default(x, inside, kind)


@operators.operator(
    "activated_layer",
    "(Tensor x, Tensor[] inside, str kind, str activation, Tensor? weight=None, float eps=0.0, Tensor? residual=None, "
    "Tensor? scale=None) -> Tensor",
)
def activated_layer(
    x: torch.Tensor, inside: list[torch.Tensor], kind: str, activation: str, weight: Given = None, eps: float = 0.0,
    residual: Given = None, scale: Given = None,
) -> torch.Tensor:  # fmt: skip
    """What ComfyUI's layer gives for activation(x), or a norm by `weight` and `eps`, times `scale` and added to
    `residual`; in one kernel where ComfyUI has one."""
    with whole_products():
        layer, more = KINDS[kind].filled(inside), _given(weight, eps, residual, scale)
        output: torch.Tensor = _activated()(layer, x, activation or None, **more)
    return output.contiguous()


@operators.shapes_of(quantised_layer)
@operators.shapes_of(int8_layer)
@operators.shapes_of(activated_layer)
def _(x: torch.Tensor, inside: list[torch.Tensor], kind: str, *more: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], KINDS[kind].outputs))
