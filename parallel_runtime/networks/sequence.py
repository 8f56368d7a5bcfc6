"""The sequence split of one transformer: what each rank has of the tokens, split and gathered at module borders."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from ..acceleration.peer_memory import PeerBuffers
from ..acceleration.peer_sharing import PeerSharing
from ..attention.ring import RingLayout
from ..attention.ulysses import WireLayout
from ..errors import UnsupportedModelError
from ..mesh.mesh import Mesh
from .shares import gather_shares, split_sizes, take_share

_LAYOUTS = 32
"""Kept layouts, of both kinds."""


_Layout = TypeVar("_Layout", WireLayout, RingLayout)


class SequenceSplit:
    """Which tokens are whose during the current forward; one object per wrapped transformer.

    `buffers`, `layout` and `ring_layout` are what attention reads inside of compiled blocks: the memory that the ranks
    share, where they share any; how uneven shares lie on the wire of the Ulysses group, and how long the chunks of the
    ring are, None where all are equally long. They follow from the arguments' shapes and the plan alone, so the ranks
    agree on them.

    Args:
        attended: see ModelSpec.
        peers: None keeps the exchange on collectives.
    """

    def __init__(self, mesh: Mesh, attended: tuple[str, ...], peers: PeerSharing | None = None):
        self.attended = attended
        self.peers = peers
        self._parts: list[SequenceSplit] = []
        self._is_part = False
        self._layouts: OrderedDict[tuple[Any, ...], WireLayout | RingLayout] = OrderedDict()
        self.set_mesh(mesh)

    def among(self, attended: tuple[str, ...]) -> SequenceSplit:
        """Return this split as an attention sees it that attends over `attended`, some of the tokens; it follows."""
        part = SequenceSplit(self._mesh, attended, self.peers)
        part._is_part = True
        self._parts.append(part)
        return part

    @property
    def read(self) -> list[Any]:
        """What attention reads beside its arguments, in this forward."""
        return [self.layout, self.ring_layout, self.buffers, *(part.read for part in self._parts)]

    def exchange_through(self, peers: PeerSharing | None) -> None:
        """Exchange heads over other memory from the next forward on."""
        self.peers = peers
        for part in self._parts:
            part.exchange_through(peers)

    def peer_bytes(self) -> int | None:
        """Of the memory that the ranks shared in the last forward, None where they shared none."""
        return None if self.buffers is None else self.buffers.memory.numel()

    def set_mesh(self, mesh: Mesh) -> None:
        """Split over another mesh from the next forward on."""
        self._mesh = mesh
        for part in self._parts:
            part.set_mesh(mesh)
        self.group = mesh.sequence
        self.index = mesh.sequence_index
        self.weights = mesh.speeds
        self.ulysses_group, self.ulysses = mesh.ulysses, mesh.plan.ulysses
        self.ring_group, self.ring, self.ring_index = mesh.ring, mesh.plan.ring, mesh.coordinate["ring"]
        self.begin()

    def begin(self) -> None:
        """Forget the lengths of the previous forward."""
        self.degree = self._mesh.plan.sequence
        self.layout: WireLayout | None = None
        self.ring_layout: RingLayout | None = None
        self.buffers: PeerBuffers | None = None
        self.dealt: tuple[int, ...] | None = None
        self._totals: dict[str, int] = {}
        self.begun = False  # something of this forward is split already, and cannot become whole again
        for part in self._parts:
            part.begin()

    def forget(self) -> None:
        """Let go of what is on the device: layouts."""
        self.begin()
        self._layouts.clear()
        for part in self._parts:
            part.forget()

    def deal(self, shares: tuple[int, ...], text: tuple[str, ...]) -> None:
        """In this forward, give every rank that many image tokens; the arguments named `text` are split as always."""
        self.dealt, self._text = shares, text
        for part in self._parts:
            part.deal(shares, text)

    def weights_of(self, name: str) -> tuple[float, ...] | None:
        """In which proportion the tokens of an argument are dealt, None for equal shares."""
        return self.weights if self.dealt is None or name in self._text else self.dealt

    def record(self, totals: dict[str, int], batch: int, device: torch.device) -> None:
        """Note how many tokens each argument has before it is split, in a batch of how many.

        Where a rank would be left without any token, which diffusers cannot compute, nothing is split: every rank
        computes the whole, of a handful of tokens.
        """
        self._totals.update(totals)
        known = [name for name in self.attended if name in self._totals]
        shares = [split_sizes(self._totals[name], self.degree, self.weights_of(name)) for name in known]
        lengths = tuple(sum(rank_shares) for rank_shares in zip(*shares, strict=True))
        self.layout = self.ring_layout = self.buffers = None
        if len(shares) < len(self.attended):
            return  # an embedding will tell the rest
        if lengths and min(lengths) == 0:
            if self._is_part or self.begun:
                raise UnsupportedModelError(
                    f"A picture of {self.output_total} tokens cannot be split over {self.degree} ranks.",
                    "Use a larger picture, or fewer ranks for one picture.",
                )
            for split in (self, *self._parts):
                split.degree = 1
            return
        if lengths:
            self._lay_out(lengths, batch, device)
        for part in self._parts:
            part.record({name: self._totals[name] for name in part.attended}, batch, device)

    def _lay_out(self, lengths: tuple[int, ...], batch: int, device: torch.device) -> None:
        if self.peers is not None and self.ring == 1:
            self.buffers = self.peers.buffers(self._mesh, lengths, batch)
        groups = [lengths[first : first + self.ulysses] for first in range(0, self.degree, self.ulysses)]
        own = groups[self.ring_index]
        if len(set(own)) > 1:
            self.layout = self._build(WireLayout, own, self.index % self.ulysses, device)
        self.ring_layout = self.lay_out_ring(tuple(map(sum, groups)), device)

    def lay_out_ring(self, chunks: tuple[int, ...], device: torch.device) -> RingLayout | None:
        """The layout of a ring whose ranks hold that many tokens; None where they hold equally many."""
        return self._build(RingLayout, chunks, self.ring_index, device) if len(set(chunks)) > 1 else None

    def _build(self, kind: type[_Layout], lengths: tuple[int, ...], index: int, device: torch.device) -> _Layout:
        """Build a layout, or take one from before: a CUDA graph cannot be recorded while one comes from the CPU."""
        key = (kind, lengths, index, device)
        if key not in self._layouts:
            self._layouts[key] = kind.build(lengths, index, device)
            while len(self._layouts) > _LAYOUTS:
                self._layouts.popitem(last=False)
        self._layouts.move_to_end(key)
        layout = self._layouts[key]
        assert isinstance(layout, kind)
        return layout

    @property
    def output_total(self) -> int:
        """Tokens of the whole output."""
        return self._totals[self.attended[0]]


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
        split.begun = True
        shared_args, shared_kwargs = list(args), dict(kwargs)
        for name, value in given.items():
            share = _share(split, value, dims[name], split.weights_of(name))
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
        if split.degree == 1:
            return None
        split.begun = True
        return _share(split, output, dim, split.weights_of(path))

    return hook


def _share(split: SequenceSplit, value: Any, dim: int, weights: tuple[float, ...] | None) -> Any:
    if isinstance(value, torch.Tensor):
        return take_share(value, dim, split.degree, split.index, weights)
    if isinstance(value, list | tuple):  # residuals of a ControlNet: one tensor per block
        return type(value)(_share(split, item, dim, weights) for item in value)
    return value


def gather_hook(split: SequenceSplit, dim: int) -> Callable[..., Any]:
    """Return a forward hook that makes the output whole again, on every rank."""

    def hook(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor | None:
        if split.degree == 1:
            return None
        assert split.group is not None
        weights = split.weights_of(split.attended[0])
        return gather_shares(output, dim, split.output_total, split.group, split.degree, weights)

    return hook
