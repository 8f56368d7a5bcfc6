"""Arguments of one call of a block, by the names that the data uses."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

POSITIONAL = inspect.Parameter.VAR_POSITIONAL
KEYWORD = inspect.Parameter.VAR_KEYWORD


class BlockCall:
    """Reads and replaces arguments; what comes out of `args` and `kwargs` is the call as it is then.

    Args:
        positional: names for *args, in a signature that has nothing else (Blocks.positional).
    """

    def __init__(
        self,
        signature: inspect.Signature,
        positional: Sequence[str],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ):
        self._bound = signature.bind(*args, **kwargs)
        self._bound.apply_defaults()
        kinds = {each.kind: each.name for each in signature.parameters.values()}
        self._others: dict[str, Any] = self._bound.arguments[kinds[KEYWORD]] if KEYWORD in kinds else {}
        self._listed: dict[str, Any] = {}
        self._list = kinds.get(POSITIONAL)
        if self._list is not None:
            self._listed = dict(zip(positional, self._bound.arguments[self._list], strict=True))

    @property
    def others(self) -> set[str]:
        """Names of arguments that the signature does not name, and that have a value."""
        return {name for name, value in self._others.items() if value is not None}

    @property
    def args(self) -> tuple[Any, ...]:
        """Positional arguments."""
        return tuple(self._listed.values()) if self._list is not None else self._bound.args

    @property
    def kwargs(self) -> dict[str, Any]:
        """Arguments by name."""
        if self._list is None:
            return self._bound.kwargs
        named = {name: value for name, value in self._bound.arguments.items() if name != self._list}
        named = {name: value for name, value in named.items() if value is not self._others}
        return {**named, **self._others}

    def _holder(self, base: str) -> MutableMapping[str, Any]:
        for holder in (self._listed, self._others):
            if base in holder:
                return holder
        return self._bound.arguments

    def __getitem__(self, name: str) -> Any:
        base, _, item = name.partition(".")
        value = self._holder(base).get(base)
        return value[int(item)] if item and value is not None else value

    def __setitem__(self, name: str, value: Any) -> None:
        base, _, item = name.partition(".")
        holder = self._holder(base)
        if item:
            items = list(holder[base])
            items[int(item)] = value
            value = type(holder[base])(items)
        if base in holder:
            holder[base] = value
