"""Where the code that is being traced is."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Traced:
    """Where the code that is being traced is: torch's compiler follows what is written here, and leaves it as it was.
    An object has its attributes from the start: a graph would be made anew once one is no longer the class's."""

    where: str = ""  # inside of which submodule of its block (Blocks.cross, Blocks.gathers)
    in_order: bool = False  # operators of the block keep their order, though none needs what another gives
    last: Tensor | None = None  # what the one before gave, where they do
    through_host: bool = False  # ranks exchange through the host's memory: a graph of its own, where that matters


TRACED = Traced()
