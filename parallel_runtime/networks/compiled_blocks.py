"""The cut blocks of a network, compiled."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from ..acceleration.compiled_methods import CompiledMethods, Varying
from .block_attention import HostAttention
from .gguf_layers import GgufLayer, gguf_layers
from .quantised_layers import QuantisedLayer, quantised_layers
from .token_split import TokenSplit


class CompiledCut:
    """Runs the forwards of blocks compiled; see `Compiled` for the methods.

    Args:
        attention: of the network; counts what blocks have exchanged.
        backend: of torch.compile.
    """

    def __init__(
        self,
        network: nn.Module,
        split: TokenSplit,
        attention: HostAttention,
        backend: str = "inductor",
    ):
        self._split = split
        self._attention = attention
        self._in_use = False
        self._quantised: weakref.WeakKeyDictionary[nn.Module, list[QuantisedLayer | GgufLayer]] = (
            weakref.WeakKeyDictionary()
        )
        self.methods = CompiledMethods(is_plain(network), backend)

    def use(self, compiled: bool) -> None:
        """See `Compiled`."""
        self._in_use = compiled

    @property
    def room(self) -> int:
        """How many graphs each forward may still get."""
        return self.methods.room

    def compiling(self) -> contextlib.AbstractContextManager[None]:
        """See `Compiled`."""
        return self.methods.compiling()

    def undo(self) -> None:
        """See `Compiled`."""
        self.use(False)

    def run(
        self,
        forward: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        varying: Varying,
    ) -> Any:
        """What stands in `TokenSplit.run_block`."""
        if not self._in_use:
            return forward(*args, **kwargs)
        for layer in self._quantised_in(forward):
            layer.look_inside()
        attended = self._attention.calls
        return self.methods.call(
            forward, args, kwargs, varying,
            # The other ranks went on after an exchange: the pool ends, and does not wait for them a second time. Of a
            # latent patch attention has kept the keys.
            may_repeat=lambda: (
                (self._split.degree == 1 and self._split.patch is None) or self._attention.calls == attended
            ),
        )  # fmt: skip

    def _quantised_in(self, forward: Callable[..., Any]) -> Sequence[QuantisedLayer | GgufLayer]:
        block = getattr(forward, "__self__", None)
        if not isinstance(block, nn.Module):
            return ()
        if block not in self._quantised:
            self._quantised[block] = [*quantised_layers(block), *gguf_layers(block)]
        return self._quantised[block]


def is_plain(network: nn.Module) -> bool:
    """All weights that graphs see are tensors as they are, none of which is quantised."""
    return all(
        type(each.data).__name__ == "Tensor" and each.dtype.is_floating_point
        for module in network.modules()
        if not isinstance(module, (QuantisedLayer, GgufLayer))
        for each in module.parameters(recurse=False)
    )
