"""A ComfyUI that is older than the one all tests are for: what it lacks is a skip with its version, and no failure."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest

NEWEST = (0, 33)
"""The ComfyUI that has all that the tests ask for."""


def read_version(checkout: Path) -> tuple[int, ...]:
    """ComfyUI's version, such as (0, 33, 0)."""
    said = (checkout / "comfyui_version.py").read_text(encoding="utf-8").partition('__version__ = "')[2]
    return tuple(int(part) for part in said.partition('"')[0].split("."))


def name_version(checkout: Path) -> str:
    """Such as "ComfyUI 0.33.0"."""
    return f"ComfyUI {'.'.join(map(str, read_version(checkout)))}"


def skip_as_older(checkout: Path, lacks: str) -> NoReturn:
    """Skip the test, where this ComfyUI is older.

    Args:
        lacks: what it does not have or do; goes on after "ComfyUI 0.8.0 ".

    Raises:
        AssertionError: it is not older.
    """
    assert read_version(checkout) < NEWEST, lacks
    pytest.skip(f"{name_version(checkout)} {lacks}")
