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


_KEPT: dict[str, Model] = {}
"""By the name of the weights in the pool, the MODEL that was made for them last."""


def keep(model: Model) -> None:
    """Keep a MODEL that is loaded, or about to be used.

    Args:
        model: or a clone of it, whose patches are not kept.
    """
    first: Any = model
    while first.parent is not None:
        first = first.parent
    _KEPT[model.remote.model.key] = first


def drop_others(model: Model) -> None:
    """Drop those whose weights have gone, but this one. Not while ComfyUI unloads models: it has no other hold on them,
    and looks at each when that is done."""
    for key, kept in list(_KEPT.items()):
        if kept is not model and not kept.remote.resident_bytes:
            del _KEPT[key]
