"""A measurement on GPUs that are smaller than these, and what each process holds of them."""

from __future__ import annotations

from collections.abc import Callable

from ..ballast import gpus_of
from ..bench import Bench, Found
from ..graphs import Way
from ..memory import peaks


def limited(bench: Bench, found: Found, measure: Callable[[Bench, Found], None], way: Way, gib: float) -> None:
    """A measurement with so much memory on each GPU, 0: all of it; nothing is loaded at the beginning."""
    found["limit GiB"] = gib
    bench.server.api.free()
    bench.wait(2.0)
    with gpus_of(0 if bench.cpu else gib, bench.many), peaks(bench.server, bench.cpu) as most:
        try:
            measure(bench, found)
        finally:
            if gib:
                found["way"] = f"{found.get('way', way.title)}, {gib:.0f} GiB"
            found["peak GiB"] = dict(most)
            bench.server.api.free()
