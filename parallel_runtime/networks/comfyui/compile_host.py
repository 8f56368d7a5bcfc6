"""Has another process compile the blocks of a ComfyUI network, from calls of them that ran as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import psutil
import torch
from torch import nn

from ...acceleration.compile_ahead import Progress
from ...acceleration.compiler_link import ProcessCompiler
from ...acceleration.compiler_messages import HostToCompile, world
from ...mesh.mesh import Mesh
from .block_examples import Example, described
from .cut_blocks import CutBlock
from .networks import name_of

_KINDS = 4
"""Of blocks that are on the device together, at most."""
_COPIES = 2
"""Of the file that ComfyUI's loader may hold on the host for a moment."""


class HostCompiler:
    """Tells the process of calls of blocks, one of each kind; see `Compiler` for the methods.

    Args:
        process: the module that it runs.
        about: the model; network and world are those of the moment.
        network: of the moment, as its weights come and go.
        size: bytes of the file.
        block: bytes of its largest block.
    """

    def __init__(self, process: str, about: HostToCompile, network: Callable[[], nn.Module], size: int, block: int):
        def describe() -> HostToCompile:
            rank, world_size = world()
            named = name_of(type(network()))
            return msgspec.structs.replace(about, network=named, rank=rank, world_size=world_size)

        self._network = network
        self._size = size
        self._process = ProcessCompiler(process, describe, _KINDS * block, lambda: None)
        self._noted: dict[Any, Example | str] | None = None

    def watch(self) -> None:
        """See Compiler."""
        self._noted = {}

    def note(self, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A block runs as it is; with the arguments that its forward gets."""
        if self._noted is None:
            return
        block = getattr(forward, "__self__", None)
        if block is None:
            self._noted[forward] = "a block's forward is not its class's"
            return
        cut = vars(block).get("forward")
        modulated = isinstance(cut, CutBlock) and cut.is_modulated
        kind = type(block), _weights(block), _outline([*args, *kwargs.values()]), modulated
        if kind in self._noted:
            return
        try:
            path = next(path for path, module in self._network().named_modules() if module is block)
            self._noted[kind] = Example(path, described(list(args)), described(dict(kwargs)), modulated)
        except TypeError as error:
            self._noted[kind] = str(error)

    def submit(self, number: int, mesh: Mesh, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """See Compiler."""
        noted, self._noted = list((self._noted or {}).values()), None
        refused = [each for each in noted if isinstance(each, str)]
        if refused or not noted:
            why = refused[0] if refused else "no block ran"
            self._process.leave_to_rank(number, f"Nothing for a compiler, as {why}")
        elif psutil.virtual_memory().available < _COPIES * self._size:
            self._process.leave_to_rank(number, "No memory on the host for a compiler")
        else:
            self._process.tell(number, mesh, msgspec.to_builtins(noted))

    def progress(self, number: int) -> Progress:
        """See Compiler."""
        return self._process.progress(number)

    def close(self) -> None:
        """See Compiler."""
        self._process.close()


def _weights(block: nn.Module) -> tuple[Any, ...]:
    """What blocks that use one graph have in common."""
    return tuple((name, type(each.data), each.dtype, each.shape) for name, each in block.named_parameters())


def _outline(values: Sequence[Any]) -> tuple[Any, ...]:
    """What calls that use one graph have in common; numbers in mappings count as alike."""
    return tuple(
        (each.shape, each.stride(), each.dtype)
        if isinstance(each, torch.Tensor)
        else _outline(each)
        if isinstance(each, list | tuple)
        else type(each)
        for each in values
    )
