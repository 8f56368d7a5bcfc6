"""The pool's processes begin before ComfyUI imports torch, and the first prompt runs in them."""

from __future__ import annotations

import pytest

from tests.patience import wait_until

from .comfy_host import beside
from .test_graph_stays_a_graph import pool_pids
from .workflow import Workflow

pytestmark = pytest.mark.host


@pytest.mark.slow
def test_the_first_prompt_runs_in_what_began_before_torch(host, tmp_path, monkeypatch):
    monkeypatch.setenv("PARALLEL_DIT_START", "cpu:2")
    second = beside(host, tmp_path / "base")
    try:
        log = second.log.read_text()
        assert "Prestartup times" in log
        assert "Failed to execute startup-script" not in log
        assert "Torch already imported" not in log
        assert wait_until(lambda: len(pool_pids(second)) == 2)
        began = pool_pids(second)
        (pool_log,) = (second.base / "pools").glob("pool-*.log")
        assert wait_until(lambda: "[rank 0] rank: What later jobs need is imported" in pool_log.read_text())
        assert second.run(Workflow(loader="cpu:2", seed=883).prompt()).error is None
        assert pool_pids(second) == began
        assert len(list((second.base / "pools").glob("pool-*.log"))) == 1
    finally:
        second.stop()
    assert wait_until(lambda: not pool_pids(second))
