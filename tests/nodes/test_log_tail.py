"""What the canvas shows of a log: whole lines from the end of the newest one."""

from __future__ import annotations

import os

from workers.state_folder import read_newest


def test_the_newest_log_is_read_from_its_end(tmp_path):
    assert read_newest(tmp_path) == ""
    for age, name in ((100, "old"), (0, "new")):
        path = tmp_path / f"{name}.log"
        path.write_text("".join(f"{name} line {number}\n" for number in range(5000)))
        os.utime(path, (10_000 - age, 10_000 - age))
    lines = read_newest(tmp_path).splitlines()
    assert lines[-1] == "new line 4999"
    assert 100 < len(lines) < 5000
    assert all(line.startswith("new line ") for line in lines)
