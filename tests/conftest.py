"""The tiers of the tests: see "Tests" in the README."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

from tests.tiers import mark_slow_cases

# A machine that does something else as well is no failure.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


@pytest.hookimpl(tryfirst=True)  # before the choice by marker
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """Of a test with many cases, those that its mark does not name are slow; GPU tests are skipped without a GPU."""
    for item in items:
        if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    mark_slow_cases(items, whole=not any("[" in asked for asked in config.args))
