"""How many graphs ComfyUI's own networks need: none for another size, another text or a third row."""

from __future__ import annotations

import pytest

from tests.comfyui_checkout import HOW, find_comfyui
from tests.comfyui_networks.catalogue import TINY
from tests.ranks import run_ranks

from .test_compiled_networks import NOT_COMPILED, PARTS

COMFYUI = find_comfyui()
with_comfyui = pytest.mark.skipif(COMFYUI is None, reason=HOW)
OPEN_IN_CI = {"minimax h3": 1, "ltx-video further inputs": 1, "flux2": 2, "kandinsky 5": 2}
"""Network -> ranks. One counts tokens, one has a mask, one has rows in dataclasses, one looks at its text."""
UNLIKE = {
    # The number of tokens is an argument.
    "omnigen 2": ["text"],
    "boogu": ["text"],
    # A further input is as large as the latent.
    "ace-step 1.5": ["size"],
    "triposplat": ["size"],
    "wan further inputs": ["size"],
    "wan vace": ["size"],
    "ltx-2 further inputs": ["size", "two", "three"],
    # One row is all that they take.
    "hunyuan video further inputs": ["two", "three"],
    "minimax h3": ["two", "three"],
    "minimax h3 further inputs": ["size", "text", "two", "three"],
    # Its rows stand behind the grid, and are not left open.
    "cosmos 1": ["two", "three"],
}
"""Network -> calls that it has not, or that need a graph."""


def need_no_graphs(ranks: int, names: list[str]) -> None:
    """Assert that another size, another text and a third row compile nothing."""
    arguments = {"comfyui": str(COMFYUI), "names": names, "unlike": UNLIKE}
    for found in run_ranks(ranks, "tests.comfyui_networks.open_graphs:graphs", arguments):
        assert set(found) == set(names)
        for name, graphs in found.items():
            assert graphs["one"] > 0, name
            assert {graphs.get(what, graphs["one"]) for what in ("size", "text")} == {graphs["one"]}, name
            assert graphs.get("three") == graphs.get("two"), name
            # Of the second rank, tokens that it shares lie somewhere in a memory, and its own begin one.
            assert ranks == 1 or graphs["alone"] == graphs.get("three", graphs["one"]), name


@with_comfyui
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_another_size_another_text_and_a_third_row_need_no_graph(ranks):
    need_no_graphs(ranks, [name for name, degree in OPEN_IN_CI.items() if degree == ranks])


@with_comfyui
@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_another_size_another_text_and_a_third_row_need_no_graph_of_any_class(part):
    need_no_graphs(1, sorted(set(TINY) - {*OPEN_IN_CI, *NOT_COMPILED})[part::PARTS])


@with_comfyui
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_another_size_or_length_of_video_and_sound_needs_no_graph_of_ltx_2(ranks):
    for found in run_ranks(ranks, "tests.comfyui_networks.open_graphs:of_lengths", {"comfyui": str(COMFYUI)}):
        assert found == {kind: [1] * 3 for kind in ("one", "frames", "sound")}


@with_comfyui
@pytest.mark.slow
def test_rows_go_through_the_graph_of_one_row_until_a_graph_of_several_pays():
    (found,) = run_ranks(1, "tests.comfyui_networks.open_graphs:rows_apart", {"comfyui": str(COMFYUI)})
    assert found["forwards"] == [1, 1, 1, 1, 1, 2, 1, 2]
    first, *later = found["graphs"]
    assert first > 0
    assert later == [first, first, 2 * first, 2 * first, 2 * first]
    assert found["middle"] == [True, True, True, False, False, False]  # of a run, where it stays as it began
    assert max(found["differences"]) < 1e-5
