"""A finding of the doctor, and the words that its sentences share."""

from __future__ import annotations

import re
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


def numbers(version: str) -> tuple[int, ...]:
    """Leading numbers of a version: "2.6.0a0+git" is (2, 6, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def count(number: int, noun: str) -> str:
    """`2 GPUs`, `1 GPU`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def gib(size: int) -> str:
    """Bytes as text in GiB."""
    return f"{size / GIB:.1f} GiB"
