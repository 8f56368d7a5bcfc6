"""The sequence split of one transformer: split and gather at module borders, attention across the ranks between."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..attention.kernels import AttentionKernel
from ..attention.peer import PeerBuffers, peer_attention
from ..attention.ulysses import WireLayout, ulysses_attention
from ..errors import UnsupportedModelError
from ..mesh import Mesh
from .peers import PeerSharing
from .shares import gather_shares, split_sizes, take_share

_LAYOUTS = 16
"""Kept layouts."""


class SequenceSplit:
    """Which tokens are whose during the current forward; one object per wrapped transformer.

    `buffers` and `layout` are what attention reads inside of compiled blocks: the memory that the ranks share, where
    they share any; else how uneven shares lie on the wire, None when all ranks have equally many tokens. They follow
    from the arguments' shapes and the plan alone, so the ranks agree on them.

    Args:
        attended: see ModelSpec.
        peers: None keeps the exchange on collectives.
    """

    def __init__(self, mesh: Mesh, attended: tuple[str, ...], peers: PeerSharing | None = None):
        self.attended = attended
        self.peers = peers
        self._layouts: OrderedDict[tuple[Any, ...], WireLayout] = OrderedDict()
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
        self.buffers: PeerBuffers | None = None
        self._totals: dict[str, int] = {}

    def record(self, totals: dict[str, int], batch: int, device: torch.device) -> None:
        """Note how many tokens each argument has before it is split, in a batch of how many.

        Where a rank would be left without any token, which diffusers cannot compute, nothing is split: every rank
        computes the whole, of a handful of tokens.
        """
        self._totals.update(totals)
        shares = [split_sizes(self._totals[name], self.degree) for name in self.attended if name in self._totals]
        lengths = tuple(sum(rank_shares) for rank_shares in zip(*shares, strict=True))
        self.layout = self.buffers = None
        if len(shares) < len(self.attended):
            return  # an embedding will tell the rest
        if lengths and min(lengths) == 0:
            if len(totals) < len(self.attended):
                raise UnsupportedModelError(
                    f"A picture of {self.output_total} tokens cannot be split over {self.degree} ranks.",
                    "Use a larger picture, or fewer ranks for one picture.",
                )
            self.degree = 1
            return
        if lengths and self.peers is not None:
            self.buffers = self.peers.buffers(self._mesh, lengths, batch)
        if self.buffers is None and len(set(lengths)) > 1:
            self.layout = self._build_layout(lengths, device)

    def _build_layout(self, lengths: tuple[int, ...], device: torch.device) -> WireLayout:
        """Build a layout, or take one from before: a CUDA graph cannot be recorded while one comes from the CPU."""
        key = (lengths, self.index, device)
        if key not in self._layouts:
            self._layouts[key] = WireLayout.build(lengths, self.index, device)
            while len(self._layouts) > _LAYOUTS:
                self._layouts.popitem(last=False)
        self._layouts.move_to_end(key)
        return self._layouts[key]

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
        if split.buffers is not None and split.peers is not None and split.peers.fits(query):
            return peer_attention(
                query,
                key,
                value,
                kernel=split.peers.kernel,
                degree=split.degree,
                buffers=split.buffers,
                scale=scale,
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
            batch = max((tensor.shape[0] for name, tensor in tensors.items() if dims[name] > 0), default=1)
            split.record({name: tensor.shape[dims[name]] for name, tensor in tensors.items()}, batch, device)
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


def output_split_hook(split: SequenceSplit, path: str, dim: int) -> Callable[..., Any]:
    """Return a forward hook that leaves this rank its share of a module's output, a tensor or a tuple of such."""

    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if split.degree == 1:
            return None
        first = output if isinstance(output, torch.Tensor) else output[0]
        if path in split.attended:
            split.record({path: first.shape[dim]}, first.shape[0], first.device)
        return _share(split, output, dim)

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
