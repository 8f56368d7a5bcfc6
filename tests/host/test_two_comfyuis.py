"""Two ComfyUIs on one machine: each has its own pool, and one that is killed takes only its own with it. The second
one's pool begins before it imports torch, and its first prompt runs there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.patience import wait_until

from .comfy_host import ComfyHost, Run, beside
from .test_graph_stays_a_graph import LONG, pool_pids
from .workflow import Workflow

pytestmark = [pytest.mark.host, pytest.mark.slow]


class Killed(Exception):
    """Leaves `ComfyHost.run`, which waits for messages that will not come."""


@pytest.fixture(scope="module")
def other(host, tmp_path_factory) -> Iterator[ComfyHost]:
    """A second ComfyUI, which starts its pool at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARALLEL_DIT_START", "cpu:2")
        second = beside(host, tmp_path_factory.mktemp("second") / "base")
    yield second
    second.process.kill()
    second.process.wait()


def test_the_first_prompt_runs_in_what_began_before_torch(other):
    log = other.log.read_text()
    assert "Prestartup times" in log
    assert "Failed to execute startup-script" not in log
    assert "Torch already imported" not in log
    assert wait_until(lambda: len(pool_pids(other)) == 2)
    began = pool_pids(other)
    (pool_log,) = (other.base / "pools").glob("pool-*.log")
    assert wait_until(lambda: "[rank 0] rank: What later jobs need is imported" in pool_log.read_text())
    assert other.run(Workflow(loader="cpu:2", seed=883).prompt()).error is None
    assert pool_pids(other) == began
    assert len(list((other.base / "pools").glob("pool-*.log"))) == 1


def test_a_comfyui_killed_in_the_middle_of_a_step_takes_its_own_pool_only(host, other):
    assert host.run(Workflow(loader="cpu:2", seed=881).prompt()).error is None
    ours = pool_pids(host)
    theirs: set[int] = set()

    def kill(run: Run) -> None:
        if run.progress:
            theirs.update(pool_pids(other))
            other.process.kill()
            raise Killed

    with pytest.raises(Killed):
        other.run(LONG.prompt(), during=kill)
    assert len(theirs) == 2
    assert not theirs & ours
    assert wait_until(lambda: not pool_pids(other))
    assert host.run(Workflow(loader="cpu:2", seed=882).prompt()).error is None
    assert pool_pids(host) == ours
