"""A network that is not as the data says is never cut into a wrong picture: it is refused, in words."""

from __future__ import annotations

import pytest

from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def said():
    return run_ranks(2, "tests.comfyui_networks.unlike:unlike")


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("like", "True"),
        ("cache", "True"),
        ("cache of one", "needs all tokens, where the one before it did not"),
        ("rows", "takes a tensor (1, 3, 4) as e of 7 tokens"),
        ("object", "takes a object as e"),
        ("window", "a mask of this rank's queries and keys alone"),
        ("window told", "its blocks have window 2"),
        ("other order told", "its blocks have flipped True"),
        ("other", "keys, where this rank has"),
        ("newer", "a block of blocks takes more"),
        ("no attention", "no attention is set"),
        ("no split", "True"),
    ],
)
def test_what_does_not_match_is_said(said, case, words):
    for each in said:
        assert words in each[case]


def test_a_block_that_returns_fewer_tokens_is_refused(said):
    assert "returns a tensor (1, 3, 4) as x of 4 tokens" in said[0]["fewer"]
