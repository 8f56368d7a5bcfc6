"""What `comfy node pack` leaves out, by .comfyignore, and what it must not."""

from __future__ import annotations

from pathlib import Path

import pathspec

from tests.nodes.test_imports_of_comfyui import OURS, file_of, imports_of

ROOT = Path(__file__).resolve().parents[1]
TOP = ("__init__.py", "LICENSE", "README.md", "pyproject.toml", "requirements.txt")
FOLDERS = (*OURS, "web", "locales", "example_workflows")
"""What ComfyUI, its frontend and the ranks read."""


def test_tests_and_benchmarks_are_left_out_and_nothing_that_runs():
    lines = (ROOT / ".comfyignore").read_text(encoding="utf-8").splitlines()
    left_out = pathspec.GitIgnoreSpec.from_lines(lines)
    folders = [ROOT / name for name in (*FOLDERS, "tests", "benchmarks")]
    found = [path.relative_to(ROOT) for folder in folders for path in folder.rglob("*.*")]
    files = [path for path in found if "__pycache__" not in path.parts]
    needed = {*map(Path, TOP), *(path for path in files if path.parts[0] in FOLDERS)}
    assert len(needed) > 300
    assert [path for path in needed if left_out.match_file(path)] == []
    assert [path for path in files if path.parts[0] not in FOLDERS and not left_out.match_file(path)] == []
    run = [ROOT / path for path in needed if path.suffix == ".py"]
    imported = {(file_of(name), path) for path in run for name in imports_of(path)}
    assert len(imported) > 1000
    assert [pair for pair in imported if pair[0] and left_out.match_file(pair[0].relative_to(ROOT))] == []
