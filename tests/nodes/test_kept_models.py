"""Which MODELs are kept while the pools have their weights."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest

from tests.comfyui_checkout import HOW, find_comfyui, import_with_comfyui

pytestmark = [pytest.mark.host, pytest.mark.skipif(find_comfyui() is None, reason=HOW)]


class Handle:
    """A MODEL of so many bytes."""

    def __init__(self, size: int, parent=None):
        self.remote = parent.remote if parent is not None else SimpleNamespace(kept=bool(size))
        self.parent = parent


@pytest.fixture
def patchers(monkeypatch):
    """nodes.pool_patchers, where nothing is kept yet."""
    (patchers,) = import_with_comfyui("nodes.pool_patchers")
    monkeypatch.setattr(patchers, "_KEPT", [])
    return patchers


def test_a_model_is_kept_as_long_as_its_weights_and_its_clones_are_not(patchers):
    first, second = Handle(1), Handle(1)
    alive = weakref.ref(first)
    clone = Handle(1, parent=first)
    for each in (first, clone, clone, second):
        patchers.keep(each)
    assert list(patchers._KEPT) == [first, second]
    gone = weakref.ref(clone)
    del each, clone
    gc.collect()
    assert gone() is None
    patchers.drop_others(second)
    first.remote.kept = False
    del first
    third = Handle(1)
    patchers.keep(third)  # ComfyUI may be in the middle of loading: nothing is dropped
    gc.collect()
    assert alive() is not None
    patchers.drop_others(third)
    gc.collect()
    assert alive() is None
    assert list(patchers._KEPT) == [second, third]
