"""Memory of the host that a GPU copies from and to at the speed of its link: registered with CUDA, and let go again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device of the process."""
MAPPED = 2
"""cudaHostRegisterMapped: a GPU's streams wait for words in it and write them, too."""


def register(memory: torch.Tensor, flags: int = 0) -> bool:
    """Pin memory (whole, contiguous) that PyTorch's allocator did not give out; returns whether that worked. Where not,
    copies are slower.

    Who registers lets go (`unregister`) before the memory is unmapped: its addresses are taken for others, for which
    this would fail.
    """
    if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, flags)) == 0:
        return True
    # CUDA's runtime tells of a call that failed at the next launch, whatever that is: it is this one.
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")
    return False


def unregister(address: int) -> None:
    """Let go of memory that was registered, by the address of its first byte."""
    torch.cuda.cudart().cudaHostUnregister(address)


@contextlib.contextmanager
def pinned(memory: torch.Tensor) -> Iterator[bool]:
    """Inside, memory is registered, if that works. Not by PyTorch's allocator, which would keep it pinned for ever."""
    registered = register(memory)
    try:
        yield registered
    finally:
        if registered:
            unregister(memory.data_ptr())
