"""Texts for artists, in English, that keep the sentence and the values which they were made of: locales/ has the
sentences in other languages, and no text is ever searched for them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

_PLACE = re.compile(r"\{(\w+)\}")


class Said(str):
    """An English text; wherever a `str` will do, it is one. `template` is the sentence with {name} for each value, by
    which other languages find it, or what stands between values that are in order; of the values, what is `Said` is
    said in the other language too."""

    __slots__ = ("template", "values")
    template: str
    values: dict[str, str] | tuple[str, ...]

    def __new__(cls, text: str, template: str | None = None, values: dict[str, str] | tuple[str, ...] = ()) -> Said:
        made = super().__new__(cls, text)
        made.template = str(text) if template is None else template
        made.values = values if values or template is not None else {}
        return made

    def to_data(self) -> list[Any]:
        """The text and what it is made of, as lists, dicts and strings."""
        values = self.values
        if isinstance(values, dict):
            return [str(self), self.template, {name: _data(value) for name, value in values.items()}]
        return [str(self), self.template, [_data(value) for value in values]]

    @classmethod
    def from_data(cls, data: Any) -> Said:
        """What `to_data` gave; a string is a sentence without values. TypeError: it is neither."""
        if isinstance(data, str):
            return cls(data)
        match data:
            case [str(text), str(template), dict(values)]:
                return cls(text, template, {str(name): _value(value) for name, value in values.items()})
            case [str(text), str(template), [*values]]:
                return cls(text, template, tuple(map(_value, values)))
        raise TypeError("A text with its template and its values was expected.")


NOTHING = Said("")


def said(template: str, /, **values: object) -> Said:
    """The sentence with its values in the places of their names."""
    kept = {name: value if isinstance(value, Said) else str(value) for name, value in values.items()}
    return Said(fill(template, kept.get), template, kept)


def as_said(text: str, /, **values: object) -> Said:
    """A sentence with those of the values that it names; what is `Said` stays as it is."""
    if isinstance(text, Said):
        return text
    return said(text, **{name: values[name] for name in _PLACE.findall(text) if name in values})


def together(parts: Iterable[str], between: str = " ") -> Said:
    """Sentences or phrases one after the other; empty ones are left out."""
    left = tuple(as_said(part) for part in parts if part)
    return left[0] if len(left) == 1 else Said(between.join(left), between, left)


def fill(template: str, value: Callable[[str], str | None]) -> str:
    """A template with what `value` gives for each name; what it does not know stays."""
    return _PLACE.sub(lambda found: found[0] if (known := value(found[1])) is None else known, template)


def _data(value: str) -> Any:
    return value.to_data() if isinstance(value, Said) else value


def _value(data: Any) -> str:
    return data if isinstance(data, str) else Said.from_data(data)
