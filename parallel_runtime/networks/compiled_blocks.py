"""The cut blocks of a network, compiled, as far as all ranks have room for their graphs."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from ..acceleration.compiled_methods import CompiledMethods, Varying
from ..exchange.host_exchange import HostBuffers
from ..replaced import replaced
from .block_attention import BlockAttention
from .gguf_layers import GgufLayer
from .quantised_layers import QuantisedLayer
from .traced import TRACED

log = logging.getLogger(__name__)

_Quantised = QuantisedLayer | GgufLayer
_ROOM = "graphs that blocks may still get"
_APART = 100
"""Forwards of several rows that go row by row before they get graphs of their own. Those take 4 s of FLUX.1's next
prompt if on disk and 9 if not, and gain 2 % of its steps; of Qwen-Image's in float8 12 %, 3 s by then."""


class QuantisedInside:
    """What is looked at before a block's graph is called: of what its quantised layers consist."""

    def __init__(self) -> None:
        self._layers: weakref.WeakKeyDictionary[nn.Module, list[_Quantised]] = weakref.WeakKeyDictionary()

    def look(self, block: nn.Module) -> None:
        """Look again, as weights come and go."""
        if block not in self._layers:
            self._layers[block] = [each for each in block.modules() if isinstance(each, _Quantised)]
        for layer in self._layers[block]:
            layer.look_inside()


class CompiledBlocks:
    """Runs blocks compiled, each when it first runs; `attention` counts exchanges, `numbers`: see `CompiledMethods`."""

    def __init__(
        self, network: nn.Module, attention: BlockAttention, numbers: Sequence[str] = (), backend: str = "inductor"
    ):
        self._attention = attention
        self._inside = QuantisedInside()
        self.methods = CompiledMethods(is_plain(network), backend, numbers)
        self.in_use = True
        self.before_compiling: Callable[[], None] = lambda: None  # called once, before the first that may compile
        self._announced = False
        self._has_one_row = self._has_several_rows = False
        self._apart = 0

    def rows_go_apart(self, rows: int, begins: bool) -> bool:
        """A forward of so many rows comes; whether they go one by one: where the graphs of one row are made and those
        of several are not, until that has been so often that they pay. Unless a run `begins` it stays as it is: in the
        middle of one the ranks do not vote on what fails."""
        if not self.in_use or self.methods.refused:
            return False
        if rows == 1:
            self._has_one_row = True
        elif self._has_one_row and not self._has_several_rows and (self._apart < _APART or not begins):
            self._apart += 1
            return True
        else:
            self._has_several_rows = True
        return False

    def offers(self) -> dict[str, int]:
        """What this rank tells of its graphs, for `go_on`."""
        return {_ROOM: self.methods.room}

    def go_on(self, agreed: Mapping[str, int]) -> None:
        """Run a request's blocks compiled, or as they are where a rank has too many graphs: by the least `offers`."""
        if _ROOM not in agreed:  # a call that repeats goes on as it began
            return
        if self.in_use and agreed[_ROOM] <= 0:
            log.warning("Blocks run as they are from now on: calls of too many kinds have been compiled.")
        self.in_use = agreed[_ROOM] > 0

    def around_forward(self) -> contextlib.AbstractContextManager[None]:
        """What must hold while the blocks run."""
        if not self.in_use:
            return contextlib.nullcontext()
        if not self._announced:
            self._announced = True
            self.before_compiling()
        return self.methods.compiling()

    def run(self, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], varying: Varying) -> Any:
        """What stands in `TokenSplit.run_block`."""
        if not self.in_use:
            return forward(*args, **kwargs)
        block = getattr(forward, "__self__", None)
        if isinstance(block, nn.Module):
            self._inside.look(block)
        attended = self._attention.calls
        # The other ranks went on after an exchange: the pool ends, and does not wait for them a second time. Of a
        # latent patch attention has kept the keys.
        split = self._attention.split
        alone = split.degree == 1 and split.patch is None
        with replaced(TRACED, "through_host", isinstance(split.tokens.buffers, HostBuffers)):
            return self.methods.call(forward, args, kwargs, varying, lambda: alone or self._attention.calls == attended)


def is_plain(network: nn.Module) -> bool:
    """All weights that graphs see are tensors as they are, none of which is quantised."""
    return all(
        type(each.data).__name__ == "Tensor" and each.dtype.is_floating_point
        for module in network.modules()
        if not isinstance(module, _Quantised)
        for each in module.parameters(recurse=False)
    )
