"""Which cases of a parametrised test are slow: those that its mark `slow_but_for` does not name. Of slow ones, long are
those that `long_but_for` does not name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest


def mark_cases(items: Iterable[pytest.Item], *, whole: bool = True) -> None:
    """Mark them.

    Args:
        whole: all cases of each test are among the items.

    Raises:
        pytest.UsageError: a mark names a case that its test does not have.
    """
    cases: dict[str, set[str]] = defaultdict(set)
    named: dict[tuple[str, str], set[str]] = {}
    for item in items:
        test, _, case = item.nodeid.partition("[")
        case = case[:-1]
        for tier in ("slow", "long"):
            mark = item.get_closest_marker(f"{tier}_but_for")
            if mark is None:
                continue
            cases[test].add(case)
            named[test, tier] = set(mark.args)
            if case not in mark.args and (tier == "slow" or item.get_closest_marker("slow") is not None):
                item.add_marker(tier)
        if item.get_closest_marker("long") is not None:
            item.add_marker("slow")
    for (test, tier), names in named.items():
        if whole and not names <= cases[test]:
            raise pytest.UsageError(f"{test}: {tier}_but_for names {names - cases[test]}, of {sorted(cases[test])}.")
