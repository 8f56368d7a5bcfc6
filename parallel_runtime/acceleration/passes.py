"""Passes over what torch.compile traced, which it does not make itself: a block's tensors are read less often.

A linear layer followed by GELU becomes one matrix product that applies GELU before it writes; one over concatenated
inputs one product per input, added up, and the concatenation is never made (docs/performance.md). Norms join the rotary
embedding that follows (rotary_pass.py), and attention takes in more of its block (attention_pass.py). The numbers are
the same to rounding: GELU sees the float32 sum, a partial sum is rounded once.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from itertools import accumulate
from operator import getitem, mul
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from ..attention.operators import operator, shapes_of
from .attention_pass import rewrite_attention
from .graph_nodes import drop_unused, joined_parts, replace, value_of
from .projection_pass import rewrite_projections
from .rotary_pass import rewrite_rotations

log = logging.getLogger(__name__)


@operator("linear_gelu", "(Tensor x, Tensor weight, Tensor bias) -> Tensor")
def linear_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """GELU (tanh) of x @ weight.T + bias; x (..., inputs), weight (outputs, inputs) -> (..., outputs)."""
    if x.device.type != "cuda":
        return F.gelu(F.linear(x, weight, bias), approximate="tanh")
    output = torch._addmm_activation(bias, x.reshape(-1, x.shape[-1]), weight.t(), use_gelu=True)
    return output.reshape(*x.shape[:-1], weight.shape[0])  # there may be no token


@shapes_of(linear_gelu)
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@operator("linear_silu_gate", "(Tensor x, Tensor weight) -> Tensor")
def linear_silu_gate(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """SiLU of the first half of x @ weight.T, times the second; x (..., inputs), weight (outputs, inputs) ->
    (..., outputs / 2)."""
    both = F.linear(x, weight)
    if both.device.type == "cuda":
        from .gate_kernel import silu_gate

        return silu_gate(both)
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


@shapes_of(linear_silu_gate)
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0] // 2))


@operator("linear_of_parts", "(Tensor[] parts, Tensor weight, Tensor? bias) -> Tensor")
def linear_of_parts(parts: list[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """cat(parts, -1) @ weight.T + bias; parts (..., inputs of the part), weight (outputs, inputs) -> (..., outputs)."""
    rows = [part.reshape(-1, part.shape[-1]) for part in parts]
    weights = weight.t().split([part.shape[-1] for part in parts])
    output = torch.mm(rows[0], weights[0]) if bias is None else torch.addmm(bias, rows[0], weights[0])
    for row, columns in zip(rows[1:], weights[1:], strict=True):
        output.addmm_(row, columns)
    return output.reshape(*parts[0].shape[:-1], weight.shape[0])


@shapes_of(linear_of_parts)
def _(parts: list[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return parts[0].new_empty((*parts[0].shape[:-1], weight.shape[0]))


class Passes(CustomGraphPass):
    """The passes, for torch._inductor.config.pre_grad_custom_pass."""

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite `graph` in place, or leave it as it is where a pass does not understand it."""
        trial = fx.Graph(graph.owning_module)
        try:
            result = trial.graph_copy(graph, {})
            trial.output(result)
            self._rewrite(trial)
            trial.lint()
        except Exception as error:  # noqa: BLE001 - a slower block is better than none, whatever another torch traces
            log.warning("Blocks are compiled without our passes: %s: %s", type(error).__name__, error)
        else:
            self._rewrite(graph)

    def _rewrite(self, graph: fx.Graph) -> None:
        _split_products(graph)
        _split_rounded(graph)
        drop_unused(graph)
        for node in [node for node in graph.nodes if node.target is torch._C._nn.linear]:
            if len(_arguments(node)) == 3:
                _fuse_gelu(graph, node)
            _drop_concatenation(graph, node)
        rewrite_rotations(graph)
        drop_unused(graph)  # what was replaced would count as a user
        rewrite_attention(graph)
        drop_unused(graph)
        rewrite_projections(graph)
        drop_unused(graph)

    def __eq__(self, other: object) -> bool:
        """torch.compile shares graphs between blocks whose options are equal."""
        return isinstance(other, Passes)

    def __hash__(self) -> int:
        return hash(self.uuid())

    def uuid(self) -> str:
        """Part of the compile cache's key: another one as soon as anything that makes graphs is another."""
        return f"parallel_dit.{source_hash()}"


@functools.cache
def source_hash() -> str:
    """Hash of all sources that transform graphs, or tell the compiler of our operators."""
    package = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    folders = [package / name for name in ("acceleration", "attention", "exchange", "networks")]
    for source in sorted(path for folder in folders for path in folder.rglob("*.py")):
        digest.update(source.relative_to(package).as_posix().encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:32]


def _split_products(graph: fx.Graph) -> None:
    """Make a product for each part of one that is split, where GELU (tanh) or a gate by SiLU is all that reads a part.
    So it is in ComfyUI's single blocks of FLUX.1 and FLUX.2: two products of the same rows do no more, and the second
    applies GELU before it writes."""
    linears: list[Any] = [node for node in graph.nodes if node.target is torch._C._nn.linear and len(node.args) == 3]
    for linear in linears:
        split: Any = next(iter(linear.users), None)
        parts = _parts_of(split) if len(linear.users) == 1 else None
        x, weight, bias = linear.args
        if parts is None or not any(_gelu_of(part) or (bias is None and _gate_of(part)) for part in parts):
            continue
        first = 0
        for part, size in zip(parts, split.args[1], strict=True):
            gated = _gate_of(part) if bias is None else None
            with graph.inserting_before(split):
                rows = [graph.call_function(torch.narrow, (each, 0, first, size)) for each in (weight, bias) if each]
                if gated is None:
                    missing = [None] * (2 - len(rows))
                    replace(part, graph.call_function(torch._C._nn.linear, (x, *rows, *missing)))
                else:
                    replace(gated, graph.call_function(torch.ops.parallel_dit.linear_silu_gate.default, (x, *rows)))
            first += size


def _split_rounded(graph: fx.Graph) -> None:
    """The same of float8 and int8 layers, so that nothing but attention reads what makes its heads."""
    ours = torch.ops.parallel_dit
    rows_of = {ours.float8_layer.default: ours.float8_rows.default, ours.int8_layer.default: ours.int8_rows.default}
    for layer in [node for node in graph.nodes if node.target in rows_of]:
        split: Any = next(iter(layer.users), None)
        parts = _parts_of(split) if len(layer.users) == 1 else None
        if parts is None or not any(_gelu_of(part) or _gate_of(part) for part in parts):
            continue
        firsts = accumulate(split.args[1], initial=0)
        for part, first, size in zip(parts, firsts, split.args[1], strict=False):
            with graph.inserting_before(split):
                rows = graph.call_function(rows_of[layer.target], (*layer.args, first, size))
            replace(part, rows)


def _parts_of(split: Any) -> list[Any] | None:
    """Parts of a split of the last dim into given sizes, each read."""
    if split.target is not torch.split or not isinstance(split.args[1], list | tuple):
        return None
    dim = split.kwargs.get("dim", split.args[2] if len(split.args) > 2 else 0)
    if dim not in (-1, value_of(split.args[0]).dim() - 1) or not all(isinstance(size, int) for size in split.args[1]):
        return None
    found = {user.args[1]: user for user in split.users if user.target is getitem}
    whole = len(found) == len(split.users) == len(split.args[1])
    return [found[index] for index in range(len(found))] if whole else None


def _gelu_of(node: fx.Node) -> fx.Node | None:
    """GELU (tanh), where it is all that reads a node."""
    if len(node.users) != 1:
        return None
    (user,) = node.users
    return user if user.target is torch._C._nn.gelu and user.kwargs.get("approximate") == "tanh" else None


def _gate_of(node: Any) -> fx.Node | None:
    """The product of SiLU of the first half of a node's last dim and the second half, where it is all that reads it."""
    if len(node.users) != 1:
        return None
    (chunk,) = node.users
    if chunk.target != "chunk" or chunk.args[1:] != (2,) or chunk.kwargs.get("dim") != -1:
        return None
    halves: dict[Any, Any] = {user.args[1]: user for user in chunk.users if user.target is getitem}
    if halves.keys() != {0, 1} or len(chunk.users) != 2 or any(len(half.users) != 1 for half in halves.values()):
        return None
    ((silu,), (product,)) = (halves[index].users for index in range(2))
    if silu.target is not F.silu or list(silu.users) != [product] or product.target is not mul:
        return None
    return product if set(product.args) == {silu, halves[1]} else None


def _arguments(linear: fx.Node) -> list[fx.Node]:
    """Input, weight and bias of a linear layer, fewer where it has no bias."""
    given = [*linear.args, *(linear.kwargs[name] for name in ("input", "weight", "bias") if name in linear.kwargs)]
    return [argument for argument in given if isinstance(argument, fx.Node)]


def _fuse_gelu(graph: fx.Graph, linear: fx.Node) -> None:
    gelu = _gelu_of(linear)
    if gelu is None:
        return
    with graph.inserting_before(linear):  # what it reads may be changed in place behind it
        fused = graph.call_function(torch.ops.parallel_dit.linear_gelu.default, tuple(_arguments(linear)))
    replace(gelu, fused)


def _drop_concatenation(graph: fx.Graph, linear: fx.Node) -> None:
    joined, weight, *bias = _arguments(linear)
    if joined.target is not torch.cat:
        return
    parts = joined_parts(joined, -1, value_of(joined).dim() - 1)
    gated = any(part.target is torch.ops.parallel_dit.linear_silu_gate.default for part in parts)
    if parts == [joined] or not (bias or gated):
        return
    with graph.inserting_before(linear):
        given = (parts, weight, bias[0] if bias else None)
        fused = graph.call_function(torch.ops.parallel_dit.linear_of_parts.default, given)
    replace(linear, fused)
