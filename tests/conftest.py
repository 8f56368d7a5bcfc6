"""The tiers of the tests: see "Tests" in docs/contributing.md."""

from __future__ import annotations

import gc
import os
import sys

import pytest
import torch
from hypothesis import settings

from tests.comfyui_checkout import HOW
from tests.order import longest_first
from tests.tiers import mark_cases

# A machine that does something else as well is no failure.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

# Hundreds of processes import the same modules: that each compiles them anew is more than half of what they compute.
# Images of containers have this set, and `make venv` leaves the compilation to whoever imports a module first.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Else each process that compiles asks the C++ compiler for seconds what the CPU's flags say already.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


def pytest_configure() -> None:
    """What is imported stays: the collector need not look through it, again and again."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Tests are collected, and with them all modules."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before the choice by marker
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """Of a test with many cases, those that its marks do not name are slow or long; GPU tests are skipped without a
    GPU; those that are skipped without a ComfyUI are host tests.

    What takes longest begins first.
    """
    for item in items:
        if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if any(mark.kwargs.get("reason") == HOW for mark in item.iter_markers("skipif")):
            item.add_marker("host")
    mark_cases(items, whole=not any("[" in asked for asked in config.args))
    items[:] = longest_first(items)
