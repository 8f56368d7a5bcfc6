"""About how long a measurement takes, from FLUX.1's work and what an H200 does in a second."""

from __future__ import annotations

from .case import Case

STARTUP = 18.0
"""Seconds: Python, its packages, the GPU, the links between GPUs, and the weights."""
COMPILING = {"": 1.0, "blocks": 25.0, "whole": 150.0}
"""Seconds, for `Case.compile`; less once a case of the same engine has filled the cache on disk."""
OPERATIONS = {"": 390e12, "blocks": 560e12, "whole": 560e12}
"""A second, of one GPU."""
SHARED = 0.7
"""What is left of a GPU's speed where several exchange data; half of it without access to each other's memory."""
SLOWEST_LAUNCH = 0.085
"""Seconds; a step kernel by kernel takes no less."""
TEXT_TOKENS = 512


def seconds_for(case: Case) -> float:
    """Of a measurement, from start to end."""
    if case.tiny:
        return 10.0
    return STARTUP + COMPILING[case.compile] + (case.warm + case.steps) * _step_seconds(case)


def _step_seconds(case: Case) -> float:
    tokens = (case.size / 16) ** 2 + TEXT_TOKENS
    # 74.4e12 operations at 1024 x 1024, a fifth of them in attention.
    share = tokens / (4096 + TEXT_TOKENS)
    operations = 59.5e12 * share + 14.9e12 * share**2
    speed = OPERATIONS[case.compile] * case.ranks
    if case.ranks > 1:
        speed *= SHARED if case.p2p or case.pipelined else SHARED / 2
    seconds = operations / speed
    return seconds if case.compile else max(seconds, SLOWEST_LAUNCH)
