"""What the canvas shows of a log: whole lines from the end of the newest one."""

from __future__ import annotations

import os
import sys
import types

import pytest


@pytest.fixture
def read_tail(monkeypatch):
    server = types.ModuleType("server")
    server.PromptServer = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "server", server)
    aiohttp = pytest.importorskip("aiohttp")
    assert aiohttp
    monkeypatch.delitem(sys.modules, "nodes.log_route", raising=False)
    from nodes.log_route import read_tail

    return read_tail


def test_the_newest_log_is_read_from_its_end(read_tail, tmp_path):
    assert read_tail(tmp_path) == ""
    for age, name in ((100, "old"), (0, "new")):
        path = tmp_path / f"{name}.log"
        path.write_text("".join(f"{name} line {number}\n" for number in range(5000)))
        os.utime(path, (10_000 - age, 10_000 - age))
    lines = read_tail(tmp_path).splitlines()
    assert lines[-1] == "new line 4999"
    assert 100 < len(lines) < 5000
    assert all(line.startswith("new line ") for line in lines)
