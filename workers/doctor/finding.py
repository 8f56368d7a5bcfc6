"""A finding of the doctor, and the words that its sentences share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["broken", "warning", "note"]
GIB = 1 << 30


@dataclass(frozen=True)
class Finding:
    """Something worth saying. "broken" makes the doctor fail; "warning" costs speed or may; "note" is for knowing.

    Args:
        what: cause, a sentence with its full stop.
        fix: what to do about it, likewise; "" for a note that asks for nothing.
    """

    level: Level
    what: str
    fix: str = ""


def is_older(version: str, oldest: str) -> bool:
    """Whether a version is older than the oldest that is good enough; its previews count as itself: 2.6.0a0 is 2.6."""
    try:
        from packaging.version import InvalidVersion, Version
    except ImportError:  # which is a finding of its own
        return False
    try:
        return Version(Version(version).base_version) < Version(oldest)
    except InvalidVersion:  # somebody's own build, who knows what is in it
        return False


def count(number: int, noun: str) -> str:
    """`2 GPUs`, `1 GPU`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def gib(size: int) -> str:
    """Bytes as text in GiB."""
    return f"{size / GIB:.1f} GiB"
