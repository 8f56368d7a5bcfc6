"""With ComfyUI's own attention and nothing compiled, one rank gives the bits of ComfyUI's own loader."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.comfyui_checkout import HOW, find_comfyui
from tests.comfyui_networks.same_bits import FILES
from tests.ranks import ROOT, run_ranks

COMFYUI = find_comfyui()
pytestmark = pytest.mark.skipif(COMFYUI is None, reason=HOW)
TARGET = "tests.comfyui_networks.same_bits:compare"
SMALL = ["FLUX.1", "FLUX.1 int8", "Wan"]


def same_on_a_cpu(folder, **more):
    (found,) = run_ranks(1, TARGET, {"comfyui": str(COMFYUI), "folder": str(folder), **more})
    return found


@pytest.mark.slow
def test_a_rank_on_a_cpu_gives_the_bits_of_comfyuis_own_loader(tmp_path):
    found = same_on_a_cpu(tmp_path, names=SMALL)
    assert {name: sum(other for other, _ in calls) for name, calls in found.items()} == dict.fromkeys(SMALL, 0)
    other = same_on_a_cpu(tmp_path, names=["FLUX.1"], attention="math")  # the comparison sees a kernel
    assert sum(count for count, _ in other["FLUX.1"]) > 0


@pytest.mark.long
def test_quantised_files_on_a_cpu(tmp_path):
    names = ["FLUX.1 int8 rotated", "FLUX.1 scaled fp8", "Qwen-Image fp8"]
    found = same_on_a_cpu(tmp_path, names=names)
    assert {name: sum(other for other, _ in calls) for name, calls in found.items()} == dict.fromkeys(names, 0)


@pytest.mark.gpu
def test_a_gpu_gives_the_bits_of_comfyuis_own_loader(tmp_path):
    given = {"comfyui": str(COMFYUI), "folder": str(tmp_path), "names": list(FILES), "gpu": True}
    command = [sys.executable, "-m", "tests.comfyui_networks.same_bits", json.dumps(given)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name: [other for other, _ in calls] for name, calls in found.items()} == {
        name: [0] * len(calls) for name, calls in found.items()
    }
    assert set(found) == set(FILES)
