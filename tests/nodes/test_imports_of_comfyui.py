"""What ComfyUI's process imports of ours: all that the nodes reach, at once or when they run, and nothing heavy."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OURS = ("nodes", "workers", "parallel_runtime")
ELSEWHERE = ("diffusers", "torch.distributed")


def imports_of(path: Path) -> Iterator[str]:
    """Modules that a file imports anywhere but for type checking, and what it takes from them."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    skipped = {inside for block in for_types for inside in ast.walk(block)}
    package = path.relative_to(ROOT).with_suffix("").parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and node not in skipped:
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node not in skipped:
            base = package[: len(package) - node.level] if node.level else ()
            module = ".".join([*base, *filter(None, [node.module])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def file_of(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None)


def reached() -> dict[str, str]:
    """Every module that ComfyUI's process may import, with the file that does."""
    found: dict[str, str] = {}
    waiting = [(f"nodes.{path.stem}", "") for path in (ROOT / "nodes").glob("*.py")]
    while waiting:
        module, by = waiting.pop()
        if module not in found:
            found[module] = by
            path = file_of(module) if module.split(".")[0] in OURS else None
            if path is not None:
                waiting += [(name, str(path.relative_to(ROOT))) for name in imports_of(path)]
    return found


def test_the_nodes_reach_neither_diffusers_nor_torch_distributed():
    found = reached()
    assert "workers.client.client" in found
    assert "parallel_runtime.planning.plan" in found
    assert {name: by for name, by in found.items() if name.startswith(ELSEWHERE)} == {}
