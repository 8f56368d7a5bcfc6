"""Which MODELs are kept while the pools have their weights."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest

from nodes import kept_models
from nodes.kept_models import drop_others, keep


class Handle:
    """A MODEL of so many bytes."""

    def __init__(self, size: int, parent=None):
        self.remote = parent.remote if parent is not None else SimpleNamespace(kept=bool(size))
        self.parent = parent


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(kept_models, "_KEPT", [])


def test_a_model_is_kept_as_long_as_its_weights_and_its_clones_are_not():
    first, second = Handle(1), Handle(1)
    alive = weakref.ref(first)
    clone = Handle(1, parent=first)
    for each in (first, clone, clone, second):
        keep(each)
    assert list(kept_models._KEPT) == [first, second]
    gone = weakref.ref(clone)
    del each, clone
    gc.collect()
    assert gone() is None
    drop_others(second)
    first.remote.kept = False
    del first
    third = Handle(1)
    keep(third)  # ComfyUI may be in the middle of loading: nothing is dropped
    gc.collect()
    assert alive() is not None
    drop_others(third)
    gc.collect()
    assert alive() is None
    assert list(kept_models._KEPT) == [second, third]
