"""How the bytes of a network's blocks are dealt out to ranks: of each block every rank keeps an equal piece."""

from __future__ import annotations

from ..gpu_memory.alignment import aligned

SLOTS = 2
"""Places on a device that the blocks which come to it use in turn."""


def resident_blocks(count: int, blocks: int) -> tuple[int, ...]:
    """Which blocks stay whole on every rank, where so many do: the first, and others evenly between those that come,
    so that these are on their way meanwhile. One block at least comes."""
    return _evenly(min(count, blocks - 1), blocks)


def held_blocks(count: int, coming: int) -> tuple[int, ...]:
    """Which of the blocks that come to other ranks a rank with more memory keeps, where it keeps so many; all of them
    at most."""
    return _evenly(min(count, coming), coming)


def _evenly(count: int, blocks: int) -> tuple[int, ...]:
    return tuple(number * blocks // count for number in range(count))


def piece(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """(start, stop) of a rank's bytes in a block of so many; the last ranks may have fewer, or none. Every block is cut
    alike, so that ranks that fetch one fetch from all others at once."""
    length = aligned(-(-size // ranks))
    return min(rank * length, size), min((rank + 1) * length, size)
