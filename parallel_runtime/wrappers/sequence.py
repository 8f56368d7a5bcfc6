"""The sequence split of one transformer: split and gather at module borders, attention across the ranks between."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..attention.kernels import AttentionKernel
from ..attention.ulysses import WireLayout, ulysses_attention
from ..errors import UnsupportedModelError
from ..mesh import Mesh
from .shares import gather_shares, split_sizes, take_share


class SequenceSplit:
    """Which tokens are whose during the current forward; one object per wrapped transformer.

    `layout` is what attention reads inside of compiled blocks, None when all ranks have equally many tokens. It
    follows from the arguments' shapes and the plan alone, so the ranks agree on it without a collective.
    """

    def __init__(self, mesh: Mesh, attended: tuple[str, ...]):
        self.attended = attended
        self.set_mesh(mesh)

    def set_mesh(self, mesh: Mesh) -> None:
        """Split over another mesh from the next forward on."""
        self._mesh = mesh
        self.begin()

    def begin(self) -> None:
        """Forget the lengths of the previous forward."""
        self.degree = self._mesh.plan.sequence
        self.index = self._mesh.sequence_index
        self.group = self._mesh.sequence
        self.layout: WireLayout | None = None
        self._totals: dict[str, int] = {}

    def record(self, totals: dict[str, int], device: torch.device) -> None:
        """Note how many tokens each argument has before it is split.

        Where a rank would be left without any token, which diffusers cannot compute, nothing is split: every rank
        computes the whole, of a handful of tokens.
        """
        self._totals.update(totals)
        shares = [split_sizes(self._totals[name], self.degree) for name in self.attended if name in self._totals]
        lengths = tuple(sum(rank_shares) for rank_shares in zip(*shares, strict=True))
        self.layout = None
        if lengths and min(lengths) == 0:
            self.degree = 1
        elif len(set(lengths)) > 1:
            self.layout = WireLayout.build(lengths, self.index, device)

    @property
    def output_total(self) -> int:
        """Tokens of the whole output."""
        return self._totals[self.attended[0]]


class SequenceAttention:
    """Attention over the tokens of all ranks; what the processors are rebound to."""

    def __init__(self, kernel: AttentionKernel, split: SequenceSplit):
        self._kernel = kernel
        self._split = split

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
    ) -> torch.Tensor:
        split = self._split
        if split.degree == 1:
            return self._kernel(query, key, value, mask, scale)
        if mask is not None or query.shape[:3] != key.shape[:3]:
            raise UnsupportedModelError(
                "The model attends with a mask, or to other tokens than its own, where the sequence is split.",
                "Set ulysses to 1; the batch can still be split.",
            )
        assert split.group is not None
        return ulysses_attention(
            query,
            key,
            value,
            kernel=self._kernel,
            group=split.group,
            degree=split.degree,
            layout=split.layout,
            scale=scale,
        )


def split_hook(split: SequenceSplit, module: nn.Module, dims: dict[str, int]) -> Callable[..., Any]:
    """Return a forward pre-hook (with_kwargs) that leaves this rank its share of the named arguments."""
    positions = {name: index for index, name in enumerate(inspect.signature(module.forward).parameters)}

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if split.degree == 1:
            return None
        given = {
            name: kwargs[name] if name in kwargs else args[positions[name]]
            for name in dims
            if name in kwargs or positions[name] < len(args)
        }
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        if tensors:
            device = next(iter(tensors.values())).device
            split.record({name: tensor.shape[dims[name]] for name, tensor in tensors.items()}, device)
        if split.degree == 1:
            return None
        shared_args, shared_kwargs = list(args), dict(kwargs)
        for name, value in given.items():
            share = _share(split, value, dims[name])
            if name in kwargs:
                shared_kwargs[name] = share
            else:
                shared_args[positions[name]] = share
        return tuple(shared_args), shared_kwargs

    return hook


def _share(split: SequenceSplit, value: Any, dim: int) -> Any:
    if isinstance(value, torch.Tensor):
        return take_share(value, dim, split.degree, split.index)
    if isinstance(value, list | tuple):  # residuals of a ControlNet: one tensor per block
        return type(value)(_share(split, item, dim) for item in value)
    return value


def gather_hook(split: SequenceSplit, dim: int) -> Callable[..., Any]:
    """Return a forward hook that makes the output whole again, on every rank."""

    def hook(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor | None:
        if split.degree == 1:
            return None
        assert split.group is not None
        return gather_shares(output, dim, split.output_total, split.group, split.degree)

    return hook
