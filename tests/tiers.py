"""Which cases of a parametrised test are slow: those that its mark `slow_but_for` does not name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest


def mark_slow_cases(items: Iterable[pytest.Item], *, whole: bool = True) -> None:
    """Mark them.

    Args:
        whole: all cases of each test are among the items.

    Raises:
        pytest.UsageError: a mark names a case that its test does not have.
    """
    cases: dict[str, set[str]] = defaultdict(set)
    named: dict[str, set[str]] = {}
    for item in items:
        mark = item.get_closest_marker("slow_but_for")
        if mark is None:
            continue
        test, _, case = item.nodeid.partition("[")
        case = case[:-1]
        cases[test].add(case)
        named[test] = set(mark.args)
        if case not in mark.args:
            item.add_marker("slow")
    for test, names in named.items():
        if whole and not names <= cases[test]:
            raise pytest.UsageError(f"{test}: slow_but_for names {names - cases[test]}, of {sorted(cases[test])}.")
