"""A mark that names the cases of the first tier names cases that there are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CONFTEST = """
from tests.tiers import mark_slow_cases

def pytest_collection_modifyitems(items, config):
    mark_slow_cases(items, whole=not any("[" in asked for asked in config.args))
"""
TEST = """
import pytest

@pytest.mark.slow_but_for({mark!r})
@pytest.mark.parametrize("case", ["a", "b"])
def test_case(case):
    pass
"""


@pytest.mark.parametrize(
    ("mark", "asked", "code", "says"),
    [
        ("a", "test_it.py", 0, "1/2 tests collected"),
        ("c", "test_it.py", 4, "slow_but_for names {'c'}, of ['a', 'b']"),
        ("a", "test_it.py::test_case[b]", 5, "no tests collected (1 deselected)"),  # says nothing of the other case
    ],
)
def test_a_mistyped_case_is_an_error(tmp_path, mark, asked, code, says):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TEST.format(mark=mark))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-m",
        "not slow",
        "-p",
        "no:cacheprovider",
        asked,
    ]
    run = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert (run.returncode, says in run.stdout + run.stderr) == (code, True)
