"""A menu takes numbers as numbers, and refuses any other value at its own input."""

from __future__ import annotations

import json

import pytest

from nodes.menu_entry import MenuEntry, numbers

DEGREES = numbers(("auto", "1", "2"))
COMPILE = [MenuEntry("auto", [True, "on"]), MenuEntry("off", [False])]


@pytest.mark.parametrize(
    ("value", "taken"),
    [
        ("2", True),
        (2, True),
        (1, True),
        ("auto", True),
        (5, False),
        ("5", False),
        (True, False),
        (None, False),
        (2.0, False),
    ],
)
def test_numbers_are_among_the_entries_as_numbers(value, taken):
    assert (value in DEGREES) is taken


@pytest.mark.parametrize(
    ("value", "taken"),
    [(True, True), (False, True), ("on", True), ("auto", True), (1, False), (0, False), ("fast", False)],
)
def test_what_earlier_versions_saved_is_among_the_entries(value, taken):
    assert (value in COMPILE) is taken


def test_the_canvas_gets_texts():
    assert json.dumps(DEGREES) == '["auto", "1", "2"]'
    assert {"2"} == {DEGREES[2]}
    assert DEGREES[2] != "1"
