"""The drawing in docs/architecture.md is that of the imports, and nothing imports in a circle."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))
import draw_house  # noqa: E402

sys.path.pop(0)


def test_the_drawing_is_not_stale():
    done = subprocess.run([sys.executable, "docs/draw_house.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or "run: python docs/draw_house.py"


def test_no_circles_of_files_or_folders():
    files = draw_house.between_files()
    assert len(files) > 150
    assert draw_house.find_circle(files) == []
    assert draw_house.find_circle(draw_house.between_folders(files)) == []
    assert draw_house.find_circle(draw_house.with_nested(files)) == []


def test_circles_are_found():
    assert draw_house.find_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert draw_house.find_circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_a_circle_through_a_nested_folder_is_one_of_its_parent():
    files = {
        "parallel_runtime.networks.sequence": {"parallel_runtime.loading.checkpoint"},
        "parallel_runtime.loading.checkpoint": {"parallel_runtime.networks.diffusers.spec", "parallel_runtime.errors"},
        "parallel_runtime.networks.diffusers.spec": {"parallel_runtime.errors"},
    }
    assert draw_house.find_circle(draw_house.between_folders(files)) == []
    circle = draw_house.find_circle(draw_house.with_nested(files))
    assert set(circle) == {"parallel_runtime.networks", "parallel_runtime.loading"}
    files["parallel_runtime.networks.sequence"] = {"parallel_runtime.errors"}
    assert draw_house.find_circle(draw_house.with_nested(files)) == []


def test_imports_inside_of_functions_and_relative_ones_count(tmp_path):
    source = tmp_path / "one.py"
    source.write_text(
        "def run():\n    from ..wire.frames import Frame\n    from . import two\n    import workers.launch\n"
    )
    known = dict.fromkeys(("workers.wire.frames", "workers.rank.two", "workers.launch", "workers.rank.one"), source)
    found = set(draw_house.imported("workers.rank.one", source, known))
    assert found == {"workers.wire.frames", "workers.rank.two", "workers.launch"}
