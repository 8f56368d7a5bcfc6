"""Modulation of a network's blocks in shares: each rank of a sequence group computes some of the layers.

These get SiLU of one tensor, a row per picture, which is there before the first block: with 16 bits a step of FLUX.1
reads 6.5 GB of them on every rank. Each layer is computed by its own forward. Blocks compute theirs themselves where
another tensor comes than the one before, and in a forward that begins without this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..attention.operators import leave_open
from ..mesh.mesh import Mesh
from .quantised_layers import become, rounds_inside
from .tables.blocks import Blocks, find

Layers = Mapping[str, Sequence["ReadyLayer"]]  # argument of a block's forward -> the layers that get SiLU of it


class ReadyLayer(nn.Module):
    """A layer becomes one by its class alone, of which its own class stays a base: weights and their names stay."""

    ready: torch.Tensor | None = None  # what it gives in this forward, (rows, ..., outputs); None: it computes itself

    def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """What is ready, of an input (rows, ...); of fewer rows the first (Qwen-Image's text beside references)."""
        ready = self.ready
        if ready is None:
            return super().forward(input, *args, **kwargs)
        if ready.shape[0] != input.shape[0]:
            ready = ready[: input.shape[0]]
        return ready.view(*input.shape[:-1], ready.shape[-1])

    @property
    def is_plain(self) -> bool:
        """Nothing stands between a call and the forward, such as a LoRA that is computed beside the layer."""
        return "forward" not in vars(self) and not self._forward_hooks and not self._forward_pre_hooks


class Modulation:
    """The modulation layers of one network; blocks tell it what they are given."""

    def __init__(self) -> None:
        self._layers: dict[str, list[ReadyLayer]] = {}
        self._mesh: Mesh | None = None
        self._given: dict[str, torch.Tensor] = {}

    def add(self, block: nn.Module, blocks: Blocks) -> Layers:
        """Take a block's layers in, of those that the data names and the block has."""
        found: dict[str, list[ReadyLayer]] = {}
        for argument, paths in blocks.modulations.items():
            modules = (find(block, path) for path in paths)
            found[argument] = [become(each, ReadyLayer) for each in modules if hasattr(each, "out_features")]
            self._layers.setdefault(argument, []).extend(found[argument])
        return {argument: own for argument, own in found.items() if own}

    def begin(self, mesh: Mesh | None) -> None:
        """A forward begins over this mesh; None: blocks compute their layers themselves."""
        self.end()
        self._mesh = mesh

    def end(self) -> None:
        """A forward has ended: let go of what was ready."""
        self._mesh = None
        self._given.clear()
        for layers in self._layers.values():
            forget(layers)

    def before(self, argument: str, value: Any, own: Sequence[ReadyLayer]) -> None:
        """A block runs with this argument. Collective over the sequence group for the first of a forward: which calls
        come first, and with which tensors, follows from the call of the network alone, so ranks agree."""
        if self._mesh is None or not isinstance(value, torch.Tensor):
            return
        if argument not in self._given:
            self._given[argument] = value
            compute(value, self._layers[argument], self._mesh)
        elif self._given[argument] is not value:
            forget(own)


def compute(value: torch.Tensor, layers: Sequence[ReadyLayer], mesh: Mesh) -> None:
    """Make layers ready that get SiLU of a tensor (rows, ..., width). Collective over the sequence group."""
    given = F.silu(value)
    # A weight that is cast first (a file of plain float8) is read once by a compiled block, and cast before by what is
    # outside of one: 93.0 instead of 89.5 ms in Qwen-Image on two H200s.
    layers = [layer for layer in layers if layer.is_plain and layer.weight.dtype == given.dtype]
    if not layers:
        return
    alone = mesh.sequence is None
    outputs = [_own(layer, given) for layer in layers] if alone else _in_shares(given, layers, mesh)
    for layer, output in zip(layers, outputs, strict=True):
        ready = output.data  # no view to torch, for which a graph would be another one
        if ready.shape[0] > 1:
            leave_open(ready, 0)  # an attribute's sizes are fixed in a graph: three rows would need another than two
        layer.__dict__["ready"] = ready


def assign(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices into `sizes` for each rank, maybe none: the largest first, to the rank that has least (Graham 1969)."""
    loads = [0] * ranks
    assigned: list[list[int]] = [[] for _ in loads]
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        rank = loads.index(min(loads))
        assigned[rank].append(index)
        loads[rank] += sizes[index]
    return assigned


def _in_shares(given: torch.Tensor, layers: Sequence[ReadyLayer], mesh: Mesh) -> list[torch.Tensor]:
    """The outputs of all layers for (..., width), of which each rank computes some. Collective over the sequence group.
    Each is contiguous, wherever it lies: for other strides torch.compile would make another graph."""
    assert mesh.sequence is not None
    rows = given.numel() // given.shape[-1]
    widths = [int(layer.out_features) for layer in layers]  # type: ignore[arg-type]
    assigned = assign(widths, mesh.plan.sequence)
    longest = max(sum(widths[each] for each in own) for own in assigned)
    mine = assigned[mesh.sequence_index]
    outputs = [_own(layers[each], given).flatten() for each in mine]
    if missing := longest - sum(widths[each] for each in mine):
        outputs.append(given.new_zeros(rows * missing))  # the collective wants equal shares
    collectives = torch.ops._c10d_functional  # what works inside of a CUDA graph
    gathered = collectives.all_gather_into_tensor(torch.cat(outputs), len(assigned), mesh.sequence.group_name)
    shares = collectives.wait_tensor(gathered).unflatten(0, (len(assigned), -1))
    found: dict[int, torch.Tensor] = {}
    for own, share in zip(assigned, shares, strict=True):  # one layer after the other
        start = 0
        for each in own:
            found[each] = share[start : start + rows * widths[each]].view(*given.shape[:-1], widths[each])
            start += rows * widths[each]
    return [found[each] for each in range(len(widths))]


def forget(layers: Sequence[ReadyLayer]) -> None:
    """Have layers compute when they are called."""
    for layer in layers:
        layer.__dict__.pop("ready", None)


def _own(layer: ReadyLayer, given: torch.Tensor) -> torch.Tensor:
    """What a layer gives by its own class."""
    output: torch.Tensor = layer.forward(given.clone() if rounds_inside(type(layer)) else given)
    return output.contiguous()
