"""Which of ComfyUI's own networks can be recorded, and that a recording follows its values."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.comfyui_checkout import HOW, find_comfyui
from tests.ranks import ROOT, run_ranks

COMFYUI = find_comfyui()
pytestmark = pytest.mark.skipif(COMFYUI is None, reason=HOW)
SENDING = ["ltx-2", "ltx-video", "wan t2v", "pixart", "hunyuandit", "auraflow"]
"""Networks that send tensors from the host in every call; Wan's relatives do as it does."""


def record(names: list[str], real: bool = False) -> dict[str, Any]:
    """What `tests.comfyui_networks.recorded:record` gives, where every step was right."""
    arguments = {"comfyui": str(COMFYUI), "names": names, "real": real}
    if real:
        found = on_a_gpu(arguments)
    else:
        (found,) = run_ranks(1, "tests.comfyui_networks.recorded:record", arguments, own_options=True)
    wrong = {call: each["differences"] for call, each in found.items() if not max(each["differences"]) < 1e-5}
    assert not wrong
    return dict(found)


def on_a_gpu(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same in a process of its own: CUDA does not outlive a fork, which ranks of tests are."""
    code = "import json, sys; from tests.comfyui_networks.recorded import record; "
    code += "print(json.dumps(record(0, 1, **json.loads(sys.argv[1]))))"
    command = [sys.executable, "-c", code, json.dumps(arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.slow
def test_networks_that_send_tensors_from_the_host_are_recorded():
    found = record(["ltx-2", "wan t2v"])
    assert {call: (each["kept"], each["sent"] > 0, each["said"]) for call, each in found.items()} == {
        "ltx-2, plain": (True, True, []),
        "wan t2v, plain": (True, True, []),
    }


@pytest.mark.slow
def test_networks_that_read_numbers_of_the_gpu_are_recorded():
    found = record(["pixart", "ltx-2 further inputs", "ideogram 4", "flux"])
    assert {"ltx-2 further inputs, guides", "ideogram 4, masked"} <= set(found)  # write into what an index chooses
    for each in found.values():
        assert each["said"] == []
        assert each["kept"]


@pytest.mark.gpu
def test_gpu_networks_that_send_and_read_are_recorded():
    found = record([*SENDING, "ltx-2 further inputs", "ideogram 4"], real=True)
    assert [call for call, each in found.items() if not each["kept"]] == []
