"""Texts of cached nodes: the same node under another number has them, one that differs anywhere above has not."""

from __future__ import annotations

import pytest

from nodes.shown_texts import MOST, ShownTexts, keys

GRAPH = {
    "1": {"class_type": "ParallelConfig", "inputs": {"devices": "cpu:2"}},
    "2": {"class_type": "ParallelLoader", "inputs": {"model_name": "a", "parallel_config": ["1", 0]}},
    "3": {"class_type": "KSampler", "inputs": {"model": ["2", 0], "seed": 5}},
}
TEXTS = {"1": "heads", "2": "Last run: both", "3": "both"}


def shown() -> ShownTexts:
    texts = ShownTexts()
    for node, text in TEXTS.items():
        texts.note(GRAPH, node, "before that")
        texts.note(GRAPH, node, text)
    texts.note(GRAPH, "3.0.1", "a node that was made while the prompt ran")
    return texts


def renumbered() -> dict:
    numbers = {"1": "9:4", "2": "7", "3": "1"}
    return {
        numbers[name]: {
            **node,
            "_meta": {"title": "another"},
            "inputs": {
                key: [numbers[value[0]], 0] if isinstance(value, list) else value
                for key, value in node["inputs"].items()
            },
        }
        for name, node in reversed(GRAPH.items())
    }


def with_value(node: str, name: str, value: object) -> dict:
    return {**GRAPH, node: {**GRAPH[node], "inputs": {**GRAPH[node]["inputs"], name: value}}}


def test_the_same_nodes_have_their_last_texts_under_any_number():
    assert shown().of(GRAPH) == TEXTS
    assert shown().of(renumbered()) == {"9:4": "heads", "7": "Last run: both", "1": "both"}


@pytest.mark.parametrize(
    ("changed", "left"),
    [
        (with_value("3", "seed", 6), {"1", "2"}),
        (with_value("2", "model_name", "b"), set()),  # what the configuration means, it means for another model
        (with_value("1", "devices", "cpu:1"), set()),
        ({}, set()),
    ],
)
def test_what_differs_above_a_node_leaves_it_without_a_text(changed, left):
    assert shown().of(changed).keys() == left


def test_links_in_a_ring_and_long_chains_have_keys_and_old_texts_go():
    ring = {"1": {"class_type": "A", "inputs": {"a": ["2", 0]}}, "2": {"class_type": "B", "inputs": {"b": ["1", 0]}}}
    assert keys(ring).keys() == {"1", "2"}
    chain = {str(n): {"class_type": "A", "inputs": {"a": [str(n + 1), 0], "n": n}} for n in range(MOST + 1)}
    texts = ShownTexts()
    for node in chain:
        texts.note(chain, node, node)
    assert len(texts.of(chain)) == MOST
    assert "0" not in texts.of(chain)
