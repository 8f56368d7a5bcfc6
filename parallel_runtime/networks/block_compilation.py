"""Whether a transformer's blocks run compiled: at once, ahead in another process, or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

from ..acceleration.compile_ahead import CompileAhead
from ..acceleration.compiler_link import ProcessCompiler
from ..acceleration.compiler_messages import ToCompile, world
from ..attention.projections import place_side_by_side
from ..attention.rotary import exchange_rotary
from ..mesh.mesh import Mesh
from .absent_blocks import is_absent
from .module_paths import first_blocks
from .network_parts import NetworkParts


class Compiled(Protocol):
    """Blocks that can run compiled."""

    def use(self, compiled: bool) -> None:
        """Run them so, or as they are, from the next forward on."""
        ...

    def compiling(self) -> contextlib.AbstractContextManager[None]:
        """What must hold around every forward."""
        ...

    def undo(self) -> None:
        """Leave the blocks as they were."""
        ...


class BlockCompilation:
    """The compiled blocks of one wrapped network.

    Args:
        make: of the blocks, when they first run compiled.
        ahead: None where the first forward compiles; else blocks run as they are until it has made their graphs.
    """

    def __init__(self, make: Callable[[], Compiled], ahead: CompileAhead | None):
        self._make = make
        self.ahead = ahead
        self.compiled: Compiled | None = None
        """None until they first run compiled."""
        self.in_use = False
        self.before_compiling: Callable[[], None] = lambda: None
        """Called once, before the first forward that may compile."""
        self._announced = False
        if ahead is None:
            self.use(True)

    def use(self, compiled: bool) -> None:
        """Run the blocks compiled, or as they are, from the next forward on; all ranks of a sequence group alike.

        What is not compiled yet is compiled when it first runs. The results are equal up to rounding.
        """
        if compiled == self.in_use:
            return
        self.in_use = compiled
        if self.compiled is None:
            self.compiled = self._make()
        self.compiled.use(compiled)

    def run(self, mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any], launch: Callable[[], Any]) -> Any:
        """Return launch(), with the blocks as they are or compiled. Collective over the mesh's sequence group.

        Args:
            args, kwargs: of the call; its kind decides.
        """
        if self.ahead is None:
            return launch()

        def call(compiled: bool) -> Any:
            self.use(compiled)
            return launch()

        return self.ahead.run(mesh, args, kwargs, call)

    def around_forward(self) -> contextlib.AbstractContextManager[None]:
        """What must hold while the blocks run."""
        if self.compiled is None or not self.in_use:
            return contextlib.nullcontext()
        if not self._announced:
            self._announced = True
            self.before_compiling()
        return self.compiled.compiling()

    def undo(self) -> None:
        """Leave the blocks as they were."""
        if self.compiled is not None:
            self.compiled.undo()
            self.compiled = None
        if self.ahead is not None:
            self.ahead.give_up()


def prepare_blocks(parts: NetworkParts) -> Callable[[], Compiled]:
    """What compiles a diffusers transformer's blocks when it is called; weights are laid out for that at once."""
    present = [block for block in parts.blocks if not is_absent(block)]
    # On a CPU the weights may be the memory-mapped file itself, which they would leave.
    together = parts.device.type == "cuda"
    if together:
        place_side_by_side(parts.attention.values())

    def make() -> Compiled:
        # Imports much of torch that nothing else needs.
        from ..acceleration.compiled_blocks import CompiledBlocks
        from ..acceleration.compiler import allow_in_graph
        from .diffusers.lean_imports import untraced_classes

        allow_in_graph(untraced_classes(parts.transformer))
        exchange_rotary(parts.attention.values())
        return CompiledBlocks(present, together)

    return make


def compile_ahead(parts: NetworkParts, process: str, peer_bytes: Callable[[], int | None]) -> CompileAhead:
    """Have a process of its own make the graphs.

    Args:
        process: the module that it runs, see `ProcessCompiler`.
        peer_bytes: see there.
    """
    return CompileAhead(ProcessCompiler(process, lambda: _to_compile(parts), _one_of_each(parts), peer_bytes))


def _to_compile(parts: NetworkParts) -> ToCompile:
    rank, world_size = world()
    weight = next(parts.transformer.parameters())  # of the moment, and not of when the parts were found
    config: Any = parts.transformer.config
    return ToCompile(
        parts.spec.name,
        dict(config),
        str(weight.dtype).removeprefix("torch."),
        str(weight.device),
        parts.kernel,
        rank,
        world_size,
        bool(parts.modulations),
    )


def _one_of_each(parts: NetworkParts) -> int:
    """Bytes of the transformer with one block of each kind."""
    firsts = first_blocks(parts.transformer, parts.spec)
    others = {id(weight) for block, first in firsts.items() if block is not first for weight in block.parameters()}
    return sum(weight.nbytes for weight in parts.transformer.parameters() if id(weight) not in others)
