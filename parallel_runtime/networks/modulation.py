"""Modulation in shares: each rank of a sequence group computes some of a transformer's modulation layers.

In the blocks of FLUX.1 and SD3 a linear layer makes shifts, scales and gates (adaLN-Zero, Peebles & Xie 2023, "Scalable
Diffusion Models with Transformers") of one embedding per picture. A split of the tokens does not shorten that: every
rank would read all of these layers' weights, 6.5 GB in FLUX.1, to multiply one row. So each layer is computed by one
rank, all of them as soon as the embedding is there, and one all-gather brings the outputs, 2 MB, to all ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ..errors import UnsupportedModelError
from ..mesh.mesh import Mesh
from ..said import said
from .diffusers.spec import ModelSpec
from .module_paths import find_modules


class ReadyLinear(nn.Linear):
    """A linear layer whose output in this forward is there before it is called: `ready`, (batch, outputs).

    A layer becomes one by its class alone: weights and their names stay. torch.compile takes `ready` as an input of
    the block's graph, so that blocks share one. Only a class from outside of torch may have such inputs of dynamic
    sizes.
    """

    ready: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return what is ready."""
        return self.ready


class SharedModulation:
    """The modulation layers that one module's output goes to, computed in shares; a forward hook of that module.

    Until `set_mesh`, and where the sequence group is one rank, the layers are left as they are.

    Args:
        linears: they get SiLU of the module's output, (batch, width), and nothing else; in the same order on all ranks.
    """

    def __init__(self, linears: Sequence[nn.Linear]):
        self._linears = linears
        self._mesh: Mesh | None = None
        self._group: dist.ProcessGroup | None = None

    def set_mesh(self, mesh: Mesh) -> None:
        """Share out over another mesh's sequence group from the next forward on. Nothing is done for the same mesh."""
        if mesh is self._mesh:
            return
        self._mesh = mesh
        self._group, self._index = mesh.sequence, mesh.sequence_index
        # Of the plan and the shapes alone, so that the ranks of the group agree without asking.
        self._assigned = assign([linear.weight.numel() for linear in self._linears], mesh.plan.sequence)
        self._become(nn.Linear if self._group is None else ReadyLinear)

    def hook(self, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        """Compute this rank's layers and make the outputs of all ready. Collective over the sequence group.

        Every forward comes here once on every rank of the group, and in each of them with the same batch: ranks that
        left it out, or had other layers, would part ways with the others.
        """
        if self._group is None:
            return
        given, linears = F.silu(output), self._linears
        outputs = compute_in_shares(
            given, [linear.out_features for linear in linears], self._assigned, self._index, self._group,
            lambda index: F.linear(given, linears[index].weight, linears[index].bias),
        )  # fmt: skip
        for linear, ready in zip(linears, outputs, strict=True):
            linear.ready = ready

    def forget(self) -> None:
        """Let go of the outputs of the last forward."""
        for linear in self._linears:
            linear.__dict__.pop("ready", None)

    def _become(self, kind: type[nn.Linear]) -> None:
        self.forget()
        for linear in self._linears:
            linear.__class__ = kind

    def undo(self) -> None:
        """Leave the layers as they were."""
        self._mesh = self._group = None
        self._become(nn.Linear)


def assign(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Assign things of these sizes to ranks: the largest first, each to the rank that has least (Graham 1969).

    Returns:
        Indices into `sizes` for each rank, none where there are too few.
    """
    loads = [(0, rank) for rank in range(ranks)]
    assigned: list[list[int]] = [[] for _ in loads]
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        load, rank = loads[0]
        assigned[rank].append(index)
        heapq.heapreplace(loads, (load + sizes[index], rank))
    return assigned


def compute_in_shares(
    given: torch.Tensor,
    widths: Sequence[int],
    assigned: Sequence[Sequence[int]],
    index: int,
    group: dist.ProcessGroup,
    compute: Callable[[int], torch.Tensor],
) -> list[torch.Tensor]:
    """The outputs of all layers, of which each rank computes some. Collective over the group.

    Args:
        given: (..., width), what all layers get.
        widths: outputs of each layer.
        assigned: layers of each rank.
        index: this rank's.
        compute: a layer's output, (..., its width), of the type of `given`.

    Returns:
        One for each of `widths`, (..., its width). Contiguous, wherever it lies: for other strides torch.compile would
        make another graph.
    """
    rows = given.numel() // given.shape[-1]
    longest = max(sum(widths[each] for each in own) for own in assigned)
    outputs = [compute(each).flatten() for each in assigned[index]]
    if missing := longest - sum(widths[each] for each in assigned[index]):
        outputs.append(given.new_zeros(rows * missing))  # the collective wants equal shares
    collectives = torch.ops._c10d_functional  # what works inside of a CUDA graph
    gathered = collectives.all_gather_into_tensor(torch.cat(outputs), len(assigned), group.group_name)
    shares = collectives.wait_tensor(gathered).unflatten(0, (len(assigned), -1))
    found: dict[int, torch.Tensor] = {}
    for own, share in zip(assigned, shares, strict=True):  # one layer after the other
        start = 0
        for each in own:
            found[each] = share[start : start + rows * widths[each]].view(*given.shape[:-1], widths[each])
            start += rows * widths[each]
    return [found[each] for each in range(len(widths))]


def find_modulations(transformer: nn.Module, spec: ModelSpec) -> dict[str, SharedModulation]:
    """Return the modulations of a transformer, nothing of it changed, by the path of the module to hook them to.

    Raises:
        UnsupportedModelError: no layer has one of the names, or one is no plain linear layer.
    """
    found = {}
    for embedder, patterns in spec.modulations.items():
        modules = find_modules(transformer, patterns)
        linears = [module for module in modules.values() if type(module) is nn.Linear]
        if not modules or len(linears) < len(modules):
            raise UnsupportedModelError(
                said(
                    "This {transformer_class} has no linear layers called {patterns}.",
                    transformer_class=spec.transformer_class,
                    patterns=", ".join(patterns),
                ),
                "Install the diffusers version that this pack asks for.",
            )
        found[embedder] = SharedModulation(linears)
    return found
