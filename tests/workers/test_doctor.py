"""From a machine's facts to the doctor's findings, exit code and text."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from parallel_runtime.networks.diffusers import lean_imports
from workers.doctor import __main__ as doctor
from workers.doctor.link_check import LinkCheck, find_failure
from workers.doctor.machine import OLDEST, Machine
from workers.doctor.report import Finding, find, write_report
from workers.launch import PACK_ROOT, PoolSpec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from .machines import GIB, gpu, machine, passed, with_package

ONE = PoolSpec("cuda", (0,))
TWO = PoolSpec("cuda", (0, 1))
CPU = PoolSpec("cpu", (0,))
PAIR = machine(gpu(0), gpu(1))


def only(spec: PoolSpec, facts: Machine, link: LinkCheck | None = None) -> Finding:
    (finding,) = find(spec, facts, link)
    return finding


def test_two_gpus_with_nvlink_have_no_finding_and_their_links_and_rate_are_shown():
    assert find(TWO, PAIR, passed("cuda:0,1")) == ()
    text = write_report("cuda:0,1", PAIR, (), passed("cuda:0,1"))
    assert "0-1  NVLink, P2P" in text
    assert "350.0 GB/s with 64 MB" in text
    assert "0  NVIDIA H200, 140.0 GiB free of 140.0 GiB, driver 570.86.15" in text
    assert "Everything that is needed works." in text


def test_one_gpu_has_no_rate():
    assert find(ONE, machine(gpu(0)), passed("cuda:0", 0.0)) == ()
    assert "GB/s" not in write_report("cuda:0", machine(gpu(0)), (), passed("cuda:0", 0.0))


def test_a_machine_without_gpus_is_told_so_and_works():
    warning = only(CPU, machine(), passed("cpu:0,1"))
    assert warning.level == "warning"
    assert "no GPU that torch can use: the pool computes on the CPU" in warning.what


def test_gpus_without_p2p_are_named_with_what_still_pays():
    apart = machine(gpu(0), gpu(1), peer_access=False, kind="PCIe, from one CPU socket to another")
    warning = only(TWO, apart, passed("cuda:0,1", 8.0))
    assert "GPUs without P2P: 0-1 cannot reach each other's memory" in warning.what
    assert warning.level == "warning"
    assert "Splitting the batch" in warning.fix
    assert "0-1  PCIe, from one CPU socket to another, no P2P" in write_report("", apart, (), None)


@pytest.mark.parametrize(("value", "warned"), [("1", True), ("0", False)])
def test_p2p_that_is_switched_off_by_hand_is_a_warning(value, warned):
    found = find(TWO, replace(PAIR, environment={"NCCL_P2P_DISABLE": value}), passed("cuda:0,1"))
    assert [(each.level, each.what.startswith("NCCL_P2P_DISABLE is set")) for each in found] == [
        ("warning", True)
    ] * warned


def test_links_to_gpus_outside_of_the_pool_do_not_count():
    three = machine(gpu(0), gpu(1), gpu(2))
    apart = tuple(replace(link, peer_access=link.second != 2) for link in three.links)
    assert find(TWO, replace(three, links=apart), passed("cuda:0,1")) == ()


def test_a_gpu_without_fast_bfloat16_is_told_of_fp16():
    assert "fp16" in only(ONE, machine(gpu(0, capability="7.5")), passed("cuda:0")).fix
    assert find(ONE, machine(gpu(0, capability="12.0")), passed("cuda:0")) == ()


def test_small_shared_memory_is_warned_of():
    warning = only(TWO, replace(PAIR, shm_free=64 << 20), passed("cuda:0,1"))
    assert "/dev/shm has 64 MiB left" in warning.what
    assert "--shm-size" in warning.fix


@pytest.mark.parametrize(
    ("facts", "what", "fix"),
    [
        (with_package("msgspec", None), "package msgspec is missing", "pip install -r .*requirements.txt"),
        (with_package("msgspec", "0.9.1"), "msgspec 0.9.1 is too old: 0.18 or newer", "requirements.txt"),
        (with_package("psutil", None), "package psutil is missing", "psutil as ComfyUI's instructions"),
        (with_package("torch", "2.5.1+cu124"), "torch 2.5.1.cu124 is too old", "ComfyUI's instructions"),
        (with_package("torch", "2.5.1.dev1"), "torch 2.5.1.dev1 is too old", "ComfyUI's instructions"),
        (replace(PAIR, problem="torch did not come up"), "torch did not come up", "nvidia-smi"),
        (replace(PAIR, gpus=(), cuda=None), "lists GPUs, and torch 2.6 was built without CUDA", "pytorch.org"),
        (replace(PAIR, gpus=PAIR.gpus[:1]), "lists 2 GPUs, and torch sees 1", "driver"),
        (replace(machine(), cuda="12.8", gpu_problem="Error 802: not ready"), "Error 802: not ready", "driver"),
    ],
)
def test_what_is_broken_names_cause_and_fix_and_fails(facts: Machine, what: str, fix: str):
    found = find(ONE if facts.gpus else CPU, facts, None)
    broken = found[0]
    assert broken.level == "broken"
    assert re.search(what, broken.what)
    assert re.search(fix, broken.fix)
    assert "Broken: 1." in write_report("", facts, found, None)


@pytest.mark.parametrize("version", ["2.6.0", "2.6.0a0+ecf3bae", "2.6.0.dev20250101+cu126", "3.0", "git-7f"])
def test_newer_versions_of_any_spelling_are_fine(version):
    assert find(TWO, with_package("torch", version, PAIR), passed("cuda:0,1")) == ()


def test_gpus_that_the_user_hid_are_not_missed():
    facts = replace(PAIR, gpus=PAIR.gpus[:1], environment={"CUDA_VISIBLE_DEVICES": "0"})
    assert find(ONE, facts, passed("cuda:0")) == ()
    assert "CUDA_VISIBLE_DEVICES=0" in write_report("cuda:0", facts, (), passed("cuda:0"))


@pytest.mark.parametrize(
    ("failure", "fix"),
    [
        ("Rank 0 failed while in the exchange by NCCL: x", "NCCL_P2P_DISABLE=1"),
        ("Rank 1 failed: OutOfMemoryError: CUDA out of memory", "Free about 1 GiB"),
        ("Rank 1 failed while in the exchange by gloo: x", "loopback"),
        ("Rank 0 failed while taking GPU 0: x", "NCCL_P2P_DISABLE=1"),
        ("The collectives did not finish within 1 seconds: rank 0 was starting Python", "--limit 300"),
        ("The check could not start: [Errno 28] No space left", "Make room"),
    ],
)
def test_a_failed_check_is_broken_with_a_fix_that_fits(failure, fix):
    link = LinkCheck("cuda:0,1", failure=failure, output="Traceback")
    broken = only(TWO, PAIR, link)
    assert (broken.level, str(broken.what)) == ("broken", f"{failure}.")
    assert fix in broken.fix
    assert "failed on cuda:0,1" in write_report("cuda:0,1", PAIR, (broken,), link)


def test_the_oldest_versions_are_those_that_an_install_asks_for():
    project = tomllib.loads((PACK_ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"] == {"diffusers": [f"diffusers>={lean_imports.OLDEST}"]}
    bounds = {name: oldest for name, _, oldest in (line.partition(">=") for line in project["dependencies"])}
    assert bounds.keys() == OLDEST.keys() - {"torch", "safetensors", "psutil"}
    assert {name for name, oldest in bounds.items() if oldest != OLDEST[name]} == {"packaging"}  # any that there is


def test_the_rank_that_failed_first_of_its_own_is_to_blame():
    joining = {"stage": "joining", "time": 2.0, "failure": "RuntimeError: Connection closed by peer"}
    full = {"stage": "taking GPU 1", "time": 3.0, "failure": "OutOfMemoryError: full"}
    exchanging = {"stage": "exchanging", "time": 1.0}
    found = {"stage": "leaving", "time": 4.0, "found": {}}
    assert find_failure([joining, full], [1, 1], 60) == "Rank 1 failed while taking GPU 1: OutOfMemoryError: full"
    assert find_failure([joining, exchanging], [1, -9], 60) == "Rank 1 was ended by signal 9 while exchanging"
    assert find_failure([joining, exchanging], [1, None], 60) == f"Rank 0 failed while joining: {joining['failure']}"
    hung = find_failure([found, exchanging], [0, None], 60)
    assert hung == "The collectives did not finish within 60 seconds: rank 1 was exchanging"
    assert find_failure([found, found], [0, 0], 60) is None


@pytest.fixture
def faked(monkeypatch):
    """main() with facts and outcome of a check given; returns the exit code."""

    def run(arguments: list[str], facts: Machine, outcome: LinkCheck | None = None) -> int:
        monkeypatch.setattr("sys.argv", ["doctor", *arguments])
        monkeypatch.setattr(doctor.signal, "signal", lambda *_: None)
        monkeypatch.setattr(doctor, "look", lambda: facts)
        monkeypatch.setattr(doctor, "check", lambda spec, limit: outcome)
        return doctor.main()

    return run


def test_exit_codes_tell_working_broken_and_wrong_arguments(faked, capsys):
    assert faked([], PAIR, passed("cuda:0,1")) == 0
    assert faked([], PAIR, LinkCheck("cuda:0,1", failure="Rank 1 ended with exit code 7")) == 1
    capsys.readouterr()
    assert faked(["--devices", "2"], PAIR) == 2
    assert "asks for GPU 2, but ComfyUI sees 2 GPUs" in capsys.readouterr().err
    assert faked(["--devices", "first"], PAIR) == 2
    with pytest.raises(SystemExit) as ended:
        faked(["--jsn"], PAIR)
    assert ended.value.code == 2


def test_a_gpu_that_only_torch_does_not_see_is_broken_and_no_wrong_argument(faked, capsys):
    assert faked(["--devices", "1"], replace(PAIR, gpus=(), cuda=None)) == 1
    assert "built without CUDA" in capsys.readouterr().out


def test_without_torch_the_report_still_comes_and_no_rank_is_started(faked, capsys):
    assert faked([], with_package("torch", None, base=machine()), passed("cpu:0,1")) == 1
    said = capsys.readouterr().out
    assert "package torch is missing" in said
    assert "not run, see Findings" in said


def test_json_is_one_line_with_verdict_and_report(faked, capsys):
    assert faked(["--json"], PAIR, passed("cuda:0,1")) == 0
    (line,) = capsys.readouterr().out.splitlines()
    text = write_report("cuda:0,1", PAIR, (), passed("cuda:0,1"))
    assert json.loads(line) == {"works": True, "text": text, "said": json.loads(json.dumps(text.to_data()))}


def test_the_documentation_explains_every_kind_of_finding():
    page = (Path(PACK_ROOT) / "docs" / "doctor.md").read_text()
    for topic in ("P2P", "/dev/shm", "built without CUDA", "is missing", "bfloat16", "did not finish"):
        assert topic in page, topic


def test_what_others_took_shows_in_what_is_free():
    text = write_report("cuda:0", machine(gpu(0, used=30 * GIB)), (), passed("cuda:0"))
    assert "110.0 GiB free of 140.0 GiB" in text
