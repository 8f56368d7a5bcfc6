"""Query, key and value projections whose weights lie side by side, so that one matrix product makes all three.

diffusers' own `fuse_projections` keeps the weights twice. Here the three layers keep their names and their parameters,
which only move to a common storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from .operators import operator, shapes_of

_GROUPS = (("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj"))


def place_side_by_side(modules: Iterable[nn.Module]) -> None:
    """Move the projections of these attention modules to a common storage each, where they do not lie so; values do
    not change."""
    for module in modules:
        for names in _joinable(module):
            layers = [module.get_submodule(name) for name in names]
            for kind in ("weight", "bias"):
                _join([layer.get_parameter(kind) for layer in layers])


def neighbours(transformer: nn.Module) -> list[tuple[str, ...]]:
    """Names of the parameters that `place_side_by_side` wants next to each other, in their order."""
    return [
        tuple(f"{path}.{name}.{kind}" for name in names)
        for path, module in transformer.named_modules()
        for names in _joinable(module)
        for kind in ("weight", "bias")
    ]


def _joinable(module: nn.Module) -> Iterator[tuple[str, ...]]:
    for names in _GROUPS:
        layers = [getattr(module, name, None) for name in names]
        linears = [layer for layer in layers if isinstance(layer, nn.Linear) and layer.bias is not None]
        if len(linears) == len(names) and len({layer.weight.shape for layer in linears}) == 1:
            yield names


def _join(parameters: Sequence[torch.Tensor]) -> None:
    if _side_by_side(parameters) is None:
        joined = torch.cat([parameter.data for parameter in parameters])
        for parameter, part in zip(parameters, joined.chunk(len(parameters)), strict=True):
            parameter.data = part


def _side_by_side(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return one tensor over tensors of one shape that follow one another in memory, None where they do not."""
    first = tensors[0]
    places = [first.data_ptr() + index * first.nbytes for index in range(len(tensors))]
    if any(not t.is_contiguous() or t.data_ptr() != place for t, place in zip(tensors, places, strict=True)):
        return None
    if first.untyped_storage().nbytes() < (first.storage_offset() * first.itemsize + len(tensors) * first.nbytes):
        return None  # neighbours by chance
    return first.as_strided((len(tensors) * first.shape[0], *first.shape[1:]), first.stride())


@operator(
    "project_together",
    "(Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor",
)
def project_together(x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor]) -> torch.Tensor:
    """Linear layers over one input, outputs joined on the last dim; one product where the weights lie side by side.

    Args:
        x: (..., inputs).
        weights, biases: of the layers, all (outputs, inputs) and (outputs,).
    """
    weight, bias = _side_by_side(weights), _side_by_side(biases)
    if weight is not None and bias is not None:
        return F.linear(x, weight, bias)
    return torch.cat([F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)], dim=-1)


@shapes_of(project_together)
def _(x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor]) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], len(weights) * weights[0].shape[0]))
