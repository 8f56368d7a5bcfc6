"""Two ComfyUIs on one machine: each has its own pool, and one that is killed takes only its own with it."""

from __future__ import annotations

import pytest

from tests.patience import wait_until

from .comfy_host import Run, beside
from .test_graph_stays_a_graph import LONG, pool_pids
from .workflow import Workflow

pytestmark = pytest.mark.host


class Killed(Exception):
    """Leaves `ComfyHost.run`, which waits for messages that will not come."""


@pytest.fixture
def other(host, tmp_path):
    """A second ComfyUI."""
    second = beside(host, tmp_path / "base")
    yield second
    second.process.kill()
    second.process.wait()


@pytest.mark.slow
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
