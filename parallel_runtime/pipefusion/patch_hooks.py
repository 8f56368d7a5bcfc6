"""Hooks that cut what a model embeds to one patch, and put the patch's output back in its place in the whole."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..networks.absent_blocks import stages_of
from ..networks.diffusers.spec import ModelSpec
from ..networks.key_slots import Slots
from ..networks.latent_cut import Patch

_ORDERS = 32
"""Kept orders of tokens: one for each size of picture and length of text."""


class PatchHooks:
    """What the hooks do to the forward at hand: `patch` None leaves all patches, in the order of `order` if any."""

    def __init__(self, spec: ModelSpec):
        self._spec = spec
        self._text = stages_of(spec).text
        self.patch: Patch | None = None
        self.order: torch.Tensor | None = None
        self.restore: torch.Tensor | None = None
        self._total = 0
        self._orders: dict[Slots, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def with_text(self) -> bool:
        """Whether text comes along: with all patches at once, or with the first of a step."""
        return self.patch is None or self.patch.has_text

    def begin(self, patch: Patch | None, total: int, slots: Slots, device: torch.device) -> None:
        """A forward begins.

        Args:
            total: image tokens of the whole.
            slots: with several ranks to a sequence, synchronous steps split every patch in bands, as the others will.
        """
        self.patch, self._total = patch, total
        self.order = self.restore = None
        if patch is None and slots.degree > 1:
            self.order, self.restore = self._both_orders(slots, device)

    def forget(self) -> None:
        """Let go of what is on the device."""
        self.order = self.restore = None
        self._orders.clear()

    def _both_orders(self, slots: Slots, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Rank by rank, and back; kept, as what comes from the CPU waits for the GPU."""
        if slots not in self._orders:
            order = torch.tensor(slots.rank_major(), device=device)
            self._orders[slots] = order, order.argsort()
            if len(self._orders) > _ORDERS:
                del self._orders[next(iter(self._orders))]
        return self._orders[slots]

    def register_inputs(self, transformer: nn.Module) -> list[Any]:
        """Cut the arguments and embeddings that the spec names; return the handles."""
        handles: list[Any] = []
        for path, dims in self._spec.sequence_inputs.items():
            module = transformer.get_submodule(path)
            handles.append(module.register_forward_pre_hook(self._input_hook(module, dims), with_kwargs=True))
        for path, dim in self._spec.sequence_splits.items():
            hook = self._embedding_hook(dim, path in self._text)
            handles.append(transformer.get_submodule(path).register_forward_hook(hook))
        return handles

    def register_outputs(self, transformer: nn.Module) -> list[Any]:
        """Put the output that the spec names in its place; return the handles."""
        return [
            transformer.get_submodule(path).register_forward_hook(self._placing_hook(dim))
            for path, dim in self._spec.sequence_outputs.items()
        ]

    def _input_hook(self, module: nn.Module, dims: Mapping[str, int]) -> Any:
        positions = {name: place for place, name in enumerate(inspect.signature(module.forward).parameters)}

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given, named = list(args), dict(kwargs)
            for name, dim in dims.items():
                if name in named:
                    named[name] = self._take(named[name], dim, name in self._text)
                elif positions[name] < len(given):
                    given[positions[name]] = self._take(given[positions[name]], dim, name in self._text)
            return tuple(given), named

        return hook

    def _embedding_hook(self, dim: int, text: bool) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            return self._take(output, dim, text)

        return hook

    def _take(self, value: Any, dim: int, text: bool) -> Any:
        """The patch's part of an argument or an embedding; text comes whole with the first patch, else not at all."""
        if isinstance(value, list | tuple):
            return type(value)(self._take(item, dim, text) for item in value)
        if not isinstance(value, torch.Tensor):
            return value
        if text:
            return value if self.with_text else value.narrow(dim, 0, 0)
        if self.patch is not None:
            return value.narrow(dim, self.patch.tokens[0], self.patch.length)
        return value if self.order is None else value.index_select(dim, self.order)

    def _placing_hook(self, dim: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
            if self.patch is None:
                return output if self.restore is None else output.index_select(dim, self.restore)
            shape = list(output.shape)
            shape[dim] = self._total
            whole = output.new_zeros(shape)
            whole.narrow(dim, self.patch.tokens[0], self.patch.length).copy_(output)
            return whole

        return hook
