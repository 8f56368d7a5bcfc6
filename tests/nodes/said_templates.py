"""Every sentence that the pack's code can say, read from the code: what locales must have."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from nodes.model_nodes import REFUSED
from parallel_runtime.errors import ERROR_TYPES

PACK = Path(__file__).parents[2]
FOLDERS = ("nodes", "workers", "parallel_runtime")
_RUNTIME = PACK / "parallel_runtime"
WITHOUT_COMFYUI = {*(_RUNTIME / "networks" / "diffusers").glob("*.py"), _RUNTIME / "loading" / "checkpoint.py"}
"""What speaks where there is no ComfyUI, in English alone."""
SPOKEN = {
    **dict.fromkeys([*ERROR_TYPES, "ParallelError", "PeerFailedError", "PoolLostError", "FrameError"], (0, 2)),
    "Finding": (1, 3),
    "said": (0, 1),
    "Said": (0, 1),
}
"""What takes sentences, and which of its arguments they are."""


def templates() -> dict[str, str]:
    """Sentence -> a file that says it."""
    files = sorted({file for folder in FOLDERS for file in (PACK / folder).rglob("*.py")} - WITHOUT_COMFYUI)
    found = {text: file.name for file in files for text in _of_file(file) if re.search("[a-z]{2}|{", text)}
    return found | dict.fromkeys(REFUSED.values(), "model_nodes.py")


def _of_file(file: Path) -> Iterator[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    named: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                _note(target, node.value, named)
        elif isinstance(node, ast.For) and isinstance(node.iter, (ast.Tuple, ast.List)):
            for value in node.iter.elts:
                _note(node.target, value, named)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in SPOKEN:
            for argument in node.args[slice(*SPOKEN[node.func.id])]:
                yield from _texts(argument, named, set())


def _note(target: ast.expr, value: ast.expr, named: dict[str, list[ast.expr]]) -> None:
    """What a name may stand for."""
    if isinstance(target, ast.Name):
        named.setdefault(target.id, []).append(value)
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.IfExp):
        _note(target, value.body, named)
        _note(target, value.orelse, named)
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for name, part in zip(target.elts, value.elts, strict=False):
            _note(name, part, named)


def _texts(node: ast.expr, named: dict[str, list[ast.expr]], seen: set[str]) -> Iterator[str]:
    """What an expression may come to, as far as it is written there."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from _texts(node.body, named, seen)
        yield from _texts(node.orelse, named, seen)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
        yield from _texts(node.func.value, named, seen)
        for argument in node.args[1:]:
            yield from _texts(argument, named, seen)
    elif isinstance(node, ast.Subscript):
        yield from _texts(node.value, named, seen)
    elif isinstance(node, (ast.Dict, ast.BoolOp)):
        for value in node.values:
            yield from _texts(value, named, seen)
    elif isinstance(node, ast.Name) and node.id not in seen:
        for value in named.get(node.id, []):
            yield from _texts(value, named, seen | {node.id})
