"""Numbers that environment variables set."""

from __future__ import annotations

import math
from collections.abc import Mapping

from parallel_runtime.errors import ConfigurationError
from parallel_runtime.said import said


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
            said(
                "The environment variable {name} is {text}, which is no time in seconds.",
                name=name,
                text=repr(text[:40]),
            ),
            said("Set it to a number such as {default}, or remove it.", default=f"{default:g}"),
        )
    return seconds
