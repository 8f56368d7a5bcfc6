"""The plain tensors that a weight consists of: its numbers, and of a quantised one its scales beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..patching.comfyui_patches import is_of_gguf


def parts(weight: Any) -> list[torch.Tensor]:
    """In a fixed order, the numbers first; in the weight's own memory."""
    if hasattr(weight, "_qdata"):
        scales = vars(weight._params)
        return [weight._qdata, *(scales[name] for name in _scales(weight))]
    if is_of_gguf(weight):
        with torch._C.DisableTorchFunctionSubclass():
            return [weight.detach().as_subclass(torch.Tensor)]
    return [weight.detach()]


def made_of(weight: Any, of: Sequence[torch.Tensor]) -> Any:
    """A weight like another one, of other parts."""
    if hasattr(weight, "_qdata"):
        params = weight._params
        scales = vars(params) | dict(zip(_scales(weight), of[1:], strict=True))
        return weight._copy_with(qdata=of[0], params=type(params)(**scales))
    if is_of_gguf(weight):
        return type(weight)(of[0], tensor_type=weight.tensor_type, tensor_shape=weight.tensor_shape, patches=[])
    return of[0]


def as_parameter(weight: Any) -> nn.Parameter:
    """It, with the very tensors that it consists of."""
    made: Any = nn.Parameter(weight, requires_grad=False)
    if hasattr(weight, "_qdata"):
        made._params = weight._params  # it was made with copies
    return made


def alike(one: Any, other: Any) -> bool:
    """Whether the parts of one can have the numbers of the other's."""
    return not is_of_gguf(one) and _layout(one) == _layout(other)


def weights_of(network: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers by name; one that has several names comes with each."""
    yield from network.named_parameters(remove_duplicate=False)
    yield from network.named_buffers(remove_duplicate=False)


def put(network: nn.Module, name: str, weight: torch.Tensor) -> None:
    """Have it in the place of that name."""
    path, _, attribute = name.rpartition(".")
    layer = network.get_submodule(path)
    (layer._parameters if attribute in layer._parameters else layer._buffers)[attribute] = weight  # type: ignore[assignment]


def _scales(weight: Any) -> list[str]:
    return sorted(name for name, value in vars(weight._params).items() if isinstance(value, torch.Tensor))


def _layout(weight: Any) -> Any:
    """Shapes, types, and numbers beside them, which a recording would have as they were."""
    beside = vars(weight._params) if hasattr(weight, "_qdata") else {}
    rest = {name: None if isinstance(value, torch.Tensor) else value for name, value in beside.items()}
    rest.pop("orig_dtype", None)
    return weight.shape, weight.dtype, [(part.shape, part.dtype) for part in parts(weight)], rest
