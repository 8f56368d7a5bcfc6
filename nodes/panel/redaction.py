"""Text for others to read: without the home folder's name, and without what looks like a secret."""

from __future__ import annotations

import re
from pathlib import Path

_SECRET = re.compile(r"(?i)\b([\w-]*(?:secret|token|password|api[_-]?key)[\w-]*\s*[=:]\s*)\S+")


def clean(text: str, home: str | None = None) -> str:
    """The text, with ~ for the home folder and *** for the values of secrets.

    Args:
        home: the folder; None for this user's.
    """
    return _SECRET.sub(r"\1***", text.replace(home or str(Path.home()), "~"))
