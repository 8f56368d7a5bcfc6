"""What torch.compile made is kept, up to a size."""

from __future__ import annotations

import os

from workers.state_folder import prune_compiled


def test_what_was_used_last_stays(tmp_path):
    for age in range(6):
        path = tmp_path / "fxgraph" / f"{age}" / "graph"
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(100))
        os.utime(path, (1_000_000 - age, 1_000_000 - age))
    for most, left in ((600, 6), (250, 2)):
        prune_compiled(tmp_path, most)
        assert sorted(path.parent.name for path in tmp_path.rglob("graph")) == [str(age) for age in range(left)]


def test_a_folder_that_is_not_there_yet_is_no_error(tmp_path):
    prune_compiled(tmp_path / "compiled")
