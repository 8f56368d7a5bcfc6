"""The MODELs whose weights the pools hold, kept as long as they do.

ComfyUI drops a MODEL with the node that made it, when other workflows run or memory of the host is short. The pool
keeps its weights for when the loader runs again. Without the MODEL, ComfyUI could not ask for the memory that they
take: not for its own models, and not for *Unload Models*.
"""

from __future__ import annotations

from typing import Any

_KEPT: list[Any] = []
"""RemoteModelPatchers that are clones of no other."""


def keep(model: Any) -> None:
    """Keep a MODEL that is loaded, or about to be used. Drops none: ComfyUI may be in the middle of loading models, and
    looks at all of them when that is done.

    Args:
        model: or a clone of it, whose patches are not kept.
    """
    first = model
    while first.parent is not None:
        first = first.parent
    if not any(first is kept for kept in _KEPT):
        _KEPT.append(first)


def drop_others(model: Any) -> None:
    """Drop those but this one whose weights have gone from the host, too, or are another's by now. Only while a loader
    runs: ComfyUI drops its own between nodes, too."""
    _KEPT[:] = [kept for kept in _KEPT if kept is model or kept.remote.kept]
