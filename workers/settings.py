"""Numbers that environment variables set."""

from __future__ import annotations

import math
from collections.abc import Mapping

from parallel_runtime.errors import ConfigurationError


def read_seconds(environment: Mapping[str, str], name: str, default: float) -> float:
    """A time in seconds, above 0.

    Raises:
        ConfigurationError: the variable holds something else.
    """
    text = environment.get(name, "")
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigurationError(
            f"The environment variable {name} is {text[:40]!r}, which is no time in seconds.",
            f"Set it to a number such as {default:g}, or remove it.",
        )
    return seconds
