"""Text for others to read: without the home folder's name, and without what looks like a secret."""

from __future__ import annotations

import re
from pathlib import Path

_NAMED = re.compile(
    r"(?i)\b([\w-]*(?:secret|token(?!s)|password|passwd|api[_-]?key)[\w-]*[\"']?\s*[=:]\s*[\"']?)[^\s\"']+"
)
_AUTHORIZATION = re.compile(r"(?i)\b((?:bearer|basic)\s+)[\w.~+/=-]{8,}")
_IN_ADDRESS = re.compile(r"(://[^\s/:@]*:)[^\s/@]+(?=@)")
_KEYS = re.compile(r"\b(hf_|sk-|ghp_|github_pat_)[\w-]{16,}")  # what such keys begin with, whatever stands before
_SECRETS = (_NAMED, _AUTHORIZATION, _IN_ADDRESS, _KEYS)


def clean(text: str, home: str | None = None) -> str:
    """The text, with ~ for the home folder and *** for the values of secrets.

    Args:
        home: the folder; None for this user's.
    """
    text = text.replace(home or str(Path.home()), "~")
    for secret in _SECRETS:
        text = secret.sub(r"\1***", text)
    return text
