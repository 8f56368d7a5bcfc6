"""Modules of a transformer by glob patterns of their paths, in which a star stands for one part of a path."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn


def matches(path: str, pattern: str) -> bool:
    """Whether a module's path ("transformer_blocks.3.attn") is like a pattern ("transformer_blocks.*.attn")."""
    parts, globs = path.split("."), pattern.split(".")
    return len(parts) == len(globs) and all(fnmatchcase(part, glob) for part, glob in zip(parts, globs, strict=True))


def find_modules(transformer: nn.Module, patterns: Iterable[str]) -> dict[str, nn.Module]:
    """Return the modules that are like any of the patterns by their paths, as the transformer orders them."""
    patterns = tuple(patterns)
    return {
        path: module
        for path, module in transformer.named_modules()
        if any(matches(path, pattern) for pattern in patterns)
    }
