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

{marks}
@pytest.mark.parametrize("case", ["a", "b", "c"])
def test_case(case):
    pass
"""


SLOW = '@pytest.mark.slow_but_for("a")'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("marks", "chosen", "asked", "code", "says"),
    [
        (SLOW, "not slow", "test_it.py", 0, "1/3 tests collected"),
        (f'@pytest.mark.long_but_for("b")\n{SLOW}', "not slow", "test_it.py", 0, "1/3 tests collected"),
        (f'@pytest.mark.long_but_for("b")\n{SLOW}', "slow and not long", "test_it.py", 0, "1/3 tests collected"),
        (f'@pytest.mark.long_but_for("b")\n{SLOW}', "slow", "test_it.py", 0, "2/3 tests collected"),
        ('@pytest.mark.slow_but_for("d")', "not slow", "test_it.py", 4, "slow_but_for names {'d'}, of ['a', 'b', 'c']"),
        (SLOW, "not slow", "test_it.py::test_case[b]", 5, "no tests collected (1 deselected)"),  # silent of the others
    ],
)
def test_a_case_is_in_the_tier_that_its_mark_says_and_a_mistyped_one_is_an_error(
    tmp_path, marks, chosen, asked, code, says
):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TEST.format(marks=marks))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-m",
        chosen,
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
