"""What names tests names tests that there are: the marks of a tier's cases, the list of what begins first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.order import LONGEST, longest_first

ROOT = Path(__file__).resolve().parents[1]
CONFTEST = """
from tests.tiers import mark_cases

def pytest_collection_modifyitems(items, config):
    mark_cases(items, whole=not any("[" in asked for asked in config.args))
"""
TEST = """
import pytest

@pytest.mark.{tier}_but_for({named!r})
@pytest.mark.parametrize("case", ["a", "b"])
def test_case(case):
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tier", "named", "asked", "code", "says"),
    [
        ("slow", "a", "test_it.py", 0, "1/2 tests collected"),
        ("long", "a", "test_it.py", 0, "1/2 tests collected"),
        ("slow", "c", "test_it.py", 4, "slow_but_for names {'c'}, of ['a', 'b']"),
        ("slow", "a", "test_it.py::test_case[b]", 5, "no tests collected (1 deselected)"),  # silent of the other case
    ],
)
def test_a_case_is_in_the_tier_that_its_mark_says_and_a_mistyped_one_is_an_error(
    tmp_path, tier, named, asked, code, says
):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TEST.format(tier=tier, named=named))
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


def test_the_longest_files_begin_first_and_are_there():
    assert all((ROOT / path).is_file() for path in LONGEST)
    names = ["tests/a.py::one", f"{LONGEST[1]}::one", f"{LONGEST[0]}::one", "tests/a.py::two", f"{LONGEST[1]}::two"]
    items: Any = [SimpleNamespace(nodeid=name) for name in names]
    order = [each.nodeid for each in longest_first(items)]
    assert order == [names[2], names[1], names[4], names[0], names[3]]
