"""The sequence split of one transformer: what each rank has of the tokens, split and gathered at module borders."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..mesh.mesh import Mesh
from .attended_tokens import AttendedTokens
from .sequence_layout import SequenceLayout
from .shares import gather_shares, take_share


class SequenceSplit:
    """Splits the tokens of one forward after the other; one object per stage.

    Args:
        attended: see ModelSpec.
    """

    def __init__(self, mesh: Mesh, attended: tuple[str, ...]):
        self.attended = attended
        self.tokens = AttendedTokens(mesh, attended, None)
        """What attention over all tokens reads."""
        self._over_parts: list[AttendedTokens] = []
        self.set_mesh(mesh)

    def among(self, attended: tuple[str, ...]) -> AttendedTokens:
        """What an attention reads that goes over some of the tokens; it follows."""
        tokens = AttendedTokens(self._mesh, attended, None)
        self._over_parts.append(tokens)
        return tokens

    @property
    def _all(self) -> list[AttendedTokens]:
        return [self.tokens, *self._over_parts]

    def read(self) -> list[Any]:
        """What attention reads beside its arguments, in this forward."""
        return [tokens.read() for tokens in self._all]

    def set_mesh(self, mesh: Mesh) -> None:
        """Split over another mesh from the next forward on."""
        self._mesh = mesh
        self.group, self.index = mesh.sequence, mesh.sequence_index
        for tokens in self._all:
            tokens.set_mesh(mesh)
        self.start()

    def start(self, assigned: tuple[int, ...] | None = None, text: tuple[str, ...] = ()) -> None:
        """A forward starts: nothing of it is counted or split.

        Args:
            assigned, text: see `SequenceLayout`.
        """
        self.layout = SequenceLayout(self._mesh.plan.sequence, self._mesh.speeds, assigned, text)
        for tokens in self._all:
            tokens.start(self.layout.degree)

    def forget(self) -> None:
        """Let go of what is on the device."""
        self.start()
        for tokens in self._all:
            tokens.forget()

    def count(self, totals: Mapping[str, int], batch: int, device: torch.device) -> None:
        """Lay the forward out anew, now that the tokens of these arguments are counted.

        Raises:
            UnsupportedModelError: a rank would be left without any token, and it is too late to compute the whole.
        """
        layout = self.layout.count(totals)
        lengths = layout.lengths(self.attended)
        if lengths and min(lengths) == 0:
            layout = layout.whole(self.attended)
        self.layout = layout
        if lengths is not None:  # else an embedding will tell the rest
            for tokens in self._all:
                tokens.lay_out(layout, batch, device)

    def take(self, value: Any, name: str, dim: int) -> Any:
        """This rank's share of an argument, which may be tensors in lists, such as the residuals of a ControlNet."""
        self.layout = self.layout.take()
        return self._share(value, dim, self.layout.weights_of(name))

    def _share(self, value: Any, dim: int, weights: Sequence[float] | None) -> Any:
        if isinstance(value, torch.Tensor):
            return take_share(value, dim, self.layout.degree, self.index, weights)
        if isinstance(value, list | tuple):
            return type(value)(self._share(item, dim, weights) for item in value)
        return value

    def gather(self, share: torch.Tensor, dim: int) -> torch.Tensor:
        """The whole of the output of which this rank has its share. Collective over the sequence group."""
        assert self.group is not None
        layout, first = self.layout, self.attended[0]
        return gather_shares(share, dim, layout.totals[first], self.group, layout.degree, layout.weights_of(first))


def split_hook(split: SequenceSplit, module: nn.Module, dims: dict[str, int]) -> Callable[..., Any]:
    """Return a forward pre-hook (with_kwargs) that leaves this rank its share of the named arguments."""
    positions = {name: index for index, name in enumerate(inspect.signature(module.forward).parameters)}

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if split.layout.degree == 1:
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
            split.count({name: tensor.shape[dims[name]] for name, tensor in tensors.items()}, batch, device)
        if split.layout.degree == 1:
            return None
        shared_args, shared_kwargs = list(args), dict(kwargs)
        for name, value in given.items():
            share = split.take(value, name, dims[name])
            if name in kwargs:
                shared_kwargs[name] = share
            else:
                shared_args[positions[name]] = share
        return tuple(shared_args), shared_kwargs

    return hook


def output_split_hook(split: SequenceSplit, path: str, dim: int) -> Callable[..., Any]:
    """Return a forward hook that leaves this rank its share of a module's output, a tensor or a tuple of such."""

    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if split.layout.degree == 1:
            return None
        first = output if isinstance(output, torch.Tensor) else output[0]
        if path in split.attended:
            split.count({path: first.shape[dim]}, first.shape[0], first.device)
        return None if split.layout.degree == 1 else split.take(output, path, dim)

    return hook


def gather_hook(split: SequenceSplit, dim: int) -> Callable[..., Any]:
    """Return a forward hook that makes the output whole again, on every rank."""

    def hook(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor | None:
        return None if split.layout.degree == 1 else split.gather(output, dim)

    return hook
