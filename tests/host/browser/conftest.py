"""The session's page with ComfyUI's canvas."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .canvas import Canvas, open_canvas, why_no_browser


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a browser, leave one of the tests, to be skipped with one line that says what is missing."""
    found = [item for item in items if "canvas" in getattr(item, "fixturenames", ())]
    missing = why_no_browser()
    if found and missing:
        found[0].add_marker(pytest.mark.skip(reason=f"{len(found)} browser tests: {missing}"))
        config.hook.pytest_deselected(items=found[1:])
        items[:] = [item for item in items if item not in found[1:]]


@pytest.fixture(scope="module")
def canvas(host) -> Iterator[Canvas]:
    """A page; no file of ours may have thrown when a test module is through."""
    with open_canvas(host.address) as opened:
        yield opened
        assert opened.errors == []
