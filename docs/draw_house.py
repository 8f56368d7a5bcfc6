"""`python docs/draw_house.py`: the drawing in docs/architecture.md, from the imports; --check says if it is stale.

A folder stands above those that it imports from. Folders or files that import in a circle are an error, also when a
folder is counted with those inside of it; imports under TYPE_CHECKING and inside of functions count.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "architecture.md"
PACKAGES = ("nodes", "workers", "parallel_runtime")
BEGIN, END = "<!-- drawn by docs/draw_house.py -->", "<!-- end of the drawing -->"
WIDTH = 30

Graph = Mapping[str, set[str]]


def modules() -> dict[str, Path]:
    """Every module of the packages, `__init__` left out, by its dotted name."""
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths if path.name != "__init__.py"
    }


def imported(name: str, path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """Modules of ours that one module imports anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        if isinstance(node, ast.ImportFrom):
            base = name.split(".")[: -node.level] if node.level else []
            base += (node.module or "").split(".") if node.module else []
            for alias in node.names:
                whole = ".".join([*base, alias.name])
                found = whole if whole in known else ".".join(base)
                if found in known:
                    yield found


def between_files() -> Graph:
    """Which module imports which."""
    known = modules()
    return {name: set(imported(name, path, known)) - {name} for name, path in known.items()}


def between_folders(files: Graph) -> Graph:
    """Which folder imports from which."""
    graph: dict[str, set[str]] = defaultdict(set)
    for name, others in files.items():
        folder = name.rpartition(".")[0]
        graph[folder] |= {other.rpartition(".")[0] for other in others} - {folder}
    return graph


def with_nested(files: Graph) -> Graph:
    """Which part of a package imports which: a folder with all folders inside of it, or a file that is in none."""

    def part(name: str) -> str:
        return ".".join(name.split(".")[:2])

    graph: dict[str, set[str]] = defaultdict(set)
    for name, others in files.items():
        graph[part(name)] |= {part(other) for other in others} - {part(name)}
    return graph


def find_circle(graph: Graph) -> list[str]:
    """Names that lead back to the first of them; empty where there is no circle."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for other in sorted(graph.get(name, ())):
            if circle := walk(other, [*path, name]):
                return circle
        done.add(name)
        return []

    return next((circle for name in sorted(graph) if (circle := walk(name, []))), [])


def draw(folders: Graph) -> str:
    """The folders in layers, each with what it imports from directly and not through another one."""
    depth: dict[str, int] = {}

    def height(name: str) -> int:
        if name not in depth:
            depth[name] = 1 + max((height(other) for other in folders.get(name, ())), default=0)
        return depth[name]

    def reach(name: str) -> set[str]:
        return {name}.union(*(reach(other) for other in folders.get(name, ())))

    for name in folders:
        height(name)
    lines = []
    for name in sorted(depth, key=lambda each: (-depth[each], each)):
        others = folders.get(name, set())
        direct = {each for each in others if not any(each in reach(other) for other in others - {each})}
        arrow = f" -> {', '.join(sorted(direct, key=lambda each: (-depth[each], each)))}" if direct else ""
        lines.append(f"{depth[name]:2}  {name:<{WIDTH}}{arrow}".rstrip())
    return "\n".join(lines)


def written(text: str) -> str:
    """The document with a new drawing."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    files = between_files()
    folders = between_folders(files)
    for graph in (files, folders, with_nested(files)):
        if circle := find_circle(graph):
            raise SystemExit(f"Imports in a circle: {' -> '.join(circle)}")
    return f"{head}{BEGIN}\n```\n{draw(folders)}\n```\n{END}{tail}"


def main() -> int:
    """Write the drawing; with --check, only say whether it is the one that is there."""
    text = DOCUMENT.read_text(encoding="utf-8")
    new = written(text)
    if "--check" in sys.argv[1:]:
        return int(new != text)
    DOCUMENT.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
