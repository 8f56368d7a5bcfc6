"""What a rank tells PyTorch's compiler beside its blocks, and hears from it. Imports the compiler when it is called."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

log = logging.getLogger(__name__)


def watch(begin: Callable[..., None], end: Callable[..., None]) -> None:
    """Have `begin` called before each graph that this process compiles, and `end` after it."""
    try:
        import torch._dynamo.callback

        handler = torch._dynamo.callback.callback_handler
        handler.register_start_callback(begin)
        handler.register_end_callback(end)
    except (ImportError, AttributeError) as error:
        log.warning(
            "A graph that compiles for over a minute looks like a stall, as this torch does not tell: %s", error
        )


def allow_in_graph(kinds: Iterable[type]) -> None:
    """Have these classes called in a graph as they are, and not traced."""
    import torch._dynamo

    for kind in kinds:
        torch._dynamo.allow_in_graph(kind)


def join_nobody(rank: int, world_size: int) -> None:
    """Join a process group whose collectives send nothing, for a process that only compiles."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
