"""Headers by key rules, and numbered blocks in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .spec import Keys, TensorInfo

MOST_BLOCKS = 256
"""In one list. The largest models that are told of have about 60."""


def count_blocks(header: Iterable[str], blocks: str) -> int:
    """Blocks of a list whose keys start with `blocks` ("double_blocks."), by the highest number.

    A hole in the numbering shows up later, as missing tensors. Numbers beyond any model's are no blocks: nobody shall
    count up to a billion because a file says so.
    """
    numbers = {key[len(blocks) :].split(".", 1)[0] for key in header if key.startswith(blocks)}
    found = (int(number) for number in numbers if number.isascii() and number.isdigit() and len(number) < 10)
    return 1 + max((number for number in found if number < MOST_BLOCKS), default=-1)


def original_header(keys: Keys, header: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Header that a file with diffusers' names would have in the original layout; what has no rule is left out."""
    original: dict[str, TensorInfo] = {}
    for rule in keys.weight_rules({name: info.shape for name, info in header.items()}):
        info = header[rule.target]
        if rule.rows is not None and info.shape:
            rows = max(sum(rule.rows), original[rule.source].shape[0] if rule.source in original else 0)
            info = replace(info, shape=(rows, *info.shape[1:]))
        original[rule.source] = info
    return original


Header = Mapping[str, TensorInfo]
Sizes = Mapping[str, int]
Config = Mapping[str, Any]
Shape = tuple[int | str, ...]
_QUANTISED = "scaled_fp8"
"""A tensor that says of the whole file that it is quantised, for which the loader has an error of its own."""


@dataclass(frozen=True)
class Recognition:
    """How a family is told, in diffusers' names, and where its config comes from; called as `ModelSpec.recognise`.

    Shapes give names to dims. One name means one size everywhere; it is that key of the config, unless it begins with
    an underscore. `_width` is the model's: divided by `attention_head_dim` it gives `num_attention_heads`. "" is any
    size, and None in place of a shape any shape.

    Args:
        shapes: parameters that every model of the family has.
        optional: the same, for parameters that may be missing.
        blocks: key of the config -> list whose blocks it counts.
        present: key of the config -> parameter that says yes.
        settings: config that no shape tells, or what stands there where an optional parameter is missing.
        published: sizes that no shape tells alone; a written config may say others.
        lookalikes: parts of keys that relatives in the same key style have.
        known: says of a key that the family has it; any other makes the file a relative's, who only add modules.
        unwritten: keys of the config that are never taken from a written one.
        further: (sizes by name, header in diffusers' names) -> the rest of the config, or None for another family.
    """

    shapes: Mapping[str, Shape | None]
    optional: Mapping[str, Shape] = field(default_factory=dict)
    blocks: Mapping[str, str] = field(default_factory=dict)
    present: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    published: Mapping[str, int] = field(default_factory=dict)
    lookalikes: tuple[str, ...] = ()
    known: Callable[[str], bool] = lambda key: True
    unwritten: tuple[str, ...] = ()
    further: Callable[[Sizes, Header], Config | None] = lambda sizes, header: {}

    def __call__(self, header: Header, written: Mapping[str, Any]) -> dict[str, Any] | None:
        """Full diffusers config of this header; None when it is another family. `written` wins over the shapes."""
        if any(mark in key for key in header for mark in self.lookalikes):
            return None
        if not all(self.known(key) or key == _QUANTISED for key in header):
            return None
        sizes = {key: written.get(key, size) for key, size in self.published.items()}
        if not all(isinstance(size, int) and size > 0 for size in sizes.values()):
            return None
        expected = {**self.shapes, **{name: shape for name, shape in self.optional.items() if name in header}}
        if not all(name in header and _fits(header[name].shape, shape, sizes) for name, shape in expected.items()):
            return None
        found = {**self.settings, **{name: size for name, size in sizes.items() if not name.startswith("_")}}
        if "_width" in sizes:
            heads, rest = divmod(sizes["_width"], sizes["attention_head_dim"])
            if rest or not heads:
                return None
            found["num_attention_heads"] = heads
        found |= {key: count_blocks(header, f"{blocks}.") for key, blocks in self.blocks.items()}
        found |= {key: parameter in header for key, parameter in self.present.items()}
        further = self.further(sizes, header)
        given = {key: value for key, value in written.items() if key not in self.unwritten}
        return None if further is None else {**found, **further, **given}


def _fits(shape: tuple[int, ...], expected: Shape | None, sizes: dict[str, int]) -> bool:
    """Whether a shape is as expected; sizes that have names are kept in `sizes`."""
    if expected is None:
        return True
    if len(shape) != len(expected):
        return False
    for size, name in zip(shape, expected, strict=True):
        if isinstance(name, int) or not name:
            fits = name in ("", size)
        else:
            fits = size > 0 and sizes.setdefault(name, size) == size
        if not fits:
            return False
    return True
