"""Whether this Python has diffusers, an extra of the install for what runs without ComfyUI."""

from __future__ import annotations

from importlib.util import find_spec

from packaging.version import Version

from ...errors import UnsupportedModelError
from ...measured import find_version
from ...said import said

OLDEST = "0.42"
"""Oldest version that the families are written for."""


def is_installed() -> bool:
    """Whether a version is there that is new enough; other packs may have brought an older one."""
    found = find_version("diffusers")
    return found is not None and find_spec("diffusers") is not None and Version(found) >= Version(OLDEST)


def absent(problem: Exception | None = None) -> UnsupportedModelError:
    """The error where diffusers is needed and not there, or does not import."""
    if problem is None:
        cause = said(
            "A diffusers folder needs the Python package diffusers ({oldest} or newer), which is not installed.",
            oldest=OLDEST,
        )
    else:
        cause = said("The Python package diffusers does not import here ({problem}).", problem=problem)
    return UnsupportedModelError(
        cause,
        'In the folder of Parallel DiT run Python with: -m pip install ".[diffusers]"',
    )
