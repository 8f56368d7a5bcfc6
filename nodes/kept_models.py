"""The MODELs whose weights the pools hold, kept as long as they do.

ComfyUI drops a MODEL with the node that made it, when other workflows run or memory of the host is short. The pool
keeps its weights for when the loader runs again. Without the MODEL, ComfyUI could not ask for the memory that they
take: not for its own models, and not for *Unload Models*.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .remote_transformer import RemoteTransformer


class Model(Protocol):
    """ComfyUI's handle on a MODEL (remote_patcher.py).

    Args:
        parent: what this is a clone of, if it is one.
    """

    parent: Any

    @property
    def remote(self) -> RemoteTransformer:
        """The transformer in the pool."""
        ...


_KEPT: list[Model] = []


def keep(model: Model) -> None:
    """Keep a MODEL that is loaded, or about to be used. Drops none: ComfyUI may be in the middle of loading models, and
    looks at all of them when that is done.

    Args:
        model: or a clone of it, whose patches are not kept.
    """
    first: Any = model
    while first.parent is not None:
        first = first.parent
    if not any(first is kept for kept in _KEPT):
        _KEPT.append(first)


def drop_others(model: Model) -> None:
    """Drop those but this one whose weights have gone from the host, too, or are another's by now. Only while a loader
    runs: ComfyUI drops its own between nodes, too."""
    _KEPT[:] = [kept for kept in _KEPT if kept is model or kept.remote.kept]
