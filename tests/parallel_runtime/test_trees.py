"""Values with tensors inside travel as data; what is not data is refused, and nothing but ComfyUI's own is made."""

from __future__ import annotations

import sys
import types

import msgspec
import pytest
import torch

from parallel_runtime.errors import RequestError
from parallel_runtime.requests.trees import flatten, map_tensors, restore


class Layout:
    """As PackedLayout of MiniMax H3: computed in its constructor, read by its attributes."""

    def __init__(self):
        raise AssertionError("nothing of it runs")


@pytest.fixture
def layout(monkeypatch) -> Layout:
    module = types.ModuleType("comfy.ldm.packed")
    module.Layout = Layout
    monkeypatch.setitem(sys.modules, "comfy.ldm.packed", module)
    monkeypatch.setattr(Layout, "__module__", "comfy.ldm.packed")
    made = object.__new__(Layout)
    made.segments, made.rows = [(0, 3, "text"), (3, None, "video")], {"ids": torch.arange(3)}
    return made


def sent(value):
    tensors: list[torch.Tensor] = []
    tree = msgspec.msgpack.decode(msgspec.msgpack.encode(flatten(value, tensors)))
    return restore(tree, tensors)


def test_plain_values_come_back_as_they_were():
    value = {"a": [1, 2.5, None, "x", True], 3: (1, (2,)), "dtype": torch.bfloat16, "empty": [{}, ()]}
    assert sent(value) == value


def test_objects_of_comfyuis_networks_come_back_with_their_tensors(layout):
    got = sent({"payload": [layout]})["payload"][0]
    assert isinstance(got, Layout)
    assert got.segments == layout.segments
    assert torch.equal(got.rows["ids"], torch.arange(3))
    assert map_tensors(layout, lambda tensor: tensor.to("meta")).rows["ids"].is_meta
    assert not layout.rows["ids"].is_meta


@pytest.mark.parametrize("value", [lambda: None, torch.nn.Linear(1, 1), {(1, 2): 3}, {print}, b"bytes"])
def test_what_is_not_data_is_refused(value):
    with pytest.raises(TypeError):
        flatten({"a": [value]}, [])


def test_too_deep_is_refused():
    value: list = []
    value.append(value)
    with pytest.raises(TypeError, match="deeper"):
        flatten(value, [])


@pytest.mark.parametrize(
    "tree",
    [
        {"tensor": 1}, {"tensor": -1}, {"object": ["os", "system", {"dict": []}]}, {"object": ["comfy.ldm.x"]},
        {"dtype": "nn"}, {"plain": [1]}, {"list": 3}, 7, {},
    ],
)  # fmt: skip
def test_hostile_trees_are_refused(tree):
    with pytest.raises(RequestError):
        restore(tree, [torch.zeros(1)])
