"""From a machine's facts to the doctor's findings, exit code and text."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from workers.doctor import doctor
from workers.doctor.diagnosis import DoctorReport, report
from workers.doctor.machine import OF_COMFYUI, OLDEST, Machine
from workers.doctor.report_text import render_text
from workers.launch import PACK_ROOT, PoolSpec
from workers.link_result import LinkCheck, judge, read_account

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from .machines import GIB, gpu, machine, passed, with_package

ONE = PoolSpec("cuda", (0,))
TWO = PoolSpec("cuda", (0, 1))
CPU = PoolSpec("cpu", (0,))
PAIR = machine(gpu(0), gpu(1))


def levels(found: DoctorReport) -> list[str]:
    return [finding.level for finding in found.findings]


def finding(found: DoctorReport, what: str):
    matching = [finding for finding in found.findings if re.search(what, finding.what)]
    assert len(matching) == 1, render_text(found)
    return matching[0]


def test_two_gpus_with_nvlink_have_no_finding():
    found = report(TWO, PAIR, passed("cuda:0,1", 2))
    assert found.findings == ()
    assert found.works
    text = render_text(found)
    assert "0-1  NVLink (18 links), P2P" in text
    assert "all-to-all 350.0 GB/s" in text


def test_one_gpu_is_told_that_there_is_nothing_to_split():
    found = report(ONE, machine(gpu(0)), passed("cuda:0", 1))
    assert levels(found) == ["note"]
    assert "compile" in finding(found, "This machine has one GPU: there is nothing to split").what
    assert "bus bandwidth" not in render_text(found)
    assert "The pool has one GPU" in report(ONE, PAIR, passed("cuda:0", 1)).findings[0].what


def test_a_machine_without_gpus_is_told_so_and_works():
    found = report(CPU, machine(), passed("cpu:0,1", 2, rate=1.0))
    assert found.works
    assert finding(found, "no GPU that torch can use: the pool computes on the CPU").level == "warning"
    assert "GPUs\n  none" in render_text(found)


def test_gpus_without_p2p_are_named_with_what_still_pays():
    found = report(TWO, machine(gpu(0), gpu(1), peer_access=False, kind="SYS"), passed("cuda:0,1", 2, 8.0))
    warning = finding(found, "GPUs without P2P: 0-1 cannot reach each other's memory")
    assert warning.level == "warning"
    assert "Splitting the batch" in warning.fix
    assert "0-1  PCIe, from one CPU socket to another, no P2P" in render_text(found)
    assert found.works


def test_pcie_with_p2p_is_a_note():
    found = report(TWO, machine(gpu(0), gpu(1), kind="PIX"), passed("cuda:0,1", 2, 20.0))
    assert finding(found, "linked by PCIe only").level == "note"


@pytest.mark.parametrize(("value", "warned"), [("1", True), ("0", False)])
def test_p2p_that_is_switched_off_by_hand_is_a_warning(value, warned):
    found = report(TWO, replace(PAIR, environment=(("NCCL_P2P_DISABLE", value),)), passed("cuda:0,1", 2))
    assert [finding.what.startswith("NCCL_P2P_DISABLE is set") for finding in found.findings] == [True] * warned
    assert found.works


def test_links_to_gpus_outside_of_the_pool_do_not_count():
    three = machine(gpu(0), gpu(1), gpu(2))
    apart = tuple(replace(link, peer_access=link.second != 2) for link in three.links)
    assert report(TWO, replace(three, links=apart), passed("cuda:0,1", 2)).findings == ()


def test_unlike_gpus_are_told_what_is_dealt_by_speed_and_what_is_not():
    mixed = machine(gpu(0, "NVIDIA A"), gpu(1, "NVIDIA B", total=24 * GIB))
    found = report(TWO, mixed, passed("cuda:0,1", 2))
    assert "by their measured speed, but CFG branches" in finding(found, r"unlike \(NVIDIA A, NVIDIA B\)").what
    assert "GPU 1 has 24.0 GiB" in finding(found, "memories differ").what


def test_a_busy_gpu_is_named_with_how_much_is_taken_and_an_idle_one_is_not():
    found = report(TWO, machine(gpu(0, used=30 * GIB), gpu(1, used=GIB // 2)), passed("cuda:0,1", 2))
    assert finding(found, r"Other processes use 30\.0 GiB of GPU 0's 140\.0 GiB").level == "warning"
    assert len(found.findings) == 1


def test_a_gpu_without_fast_bfloat16_is_told_of_fp16():
    found = report(ONE, machine(gpu(0, capability="7.5")), passed("cuda:0", 1))
    assert "fp16" in finding(found, r"compute capability 7\.5").fix
    assert "bfloat16" not in render_text(report(ONE, machine(gpu(0, capability="12.0")), passed("cuda:0", 1)))


def test_small_shared_memory_and_little_host_memory_are_warned_of():
    found = report(TWO, replace(PAIR, shm_total=64 << 20, shm_free=64 << 20), passed("cuda:0,1", 2))
    assert "--shm-size" in finding(found, "/dev/shm has 64 MiB left").fix
    found = report(TWO, replace(PAIR, memory_available=GIB), passed("cuda:0,1", 2))
    assert finding(found, r"1\.0 GiB of host memory is available, and 2 ranks may take 4\.0 GiB").level == "warning"


@pytest.mark.parametrize(
    ("facts", "what", "fix"),
    [
        (with_package("msgspec", None), "package msgspec is missing", "pip install -r .*requirements.txt"),
        (with_package("msgspec", "0.9.1"), "msgspec 0.9.1 is too old: 0.18 or newer", "requirements.txt"),
        (with_package("psutil", None), "package psutil is missing", "psutil as ComfyUI's instructions"),
        (with_package("torch", "2.5.1+cu124"), "torch 2.5.1.cu124 is too old", "ComfyUI's instructions"),
        (with_package("torch", "2.5.1.dev1"), "torch 2.5.1.dev1 is too old", "ComfyUI's instructions"),
        (with_package("msgspec", "0.20", "ImportError: no x"), r"does not import \(ImportError: no x\)", "reinstall"),
        (replace(PAIR, python="3.9.18"), "Python 3.9.18", "newer Python"),
        (replace(PAIR, problem="Reading took too long"), "Reading took too long", "nvidia-smi"),
        (replace(machine(), driver_gpus=2), "lists 2 GPUs, and torch 2.6 was built without CUDA", "pytorch.org"),
        (replace(PAIR, driver_gpus=3), "lists 3 GPUs, and torch 2.6 sees 2", "driver"),
        (replace(machine(), cuda="12.8", gpu_problem="Error 802: not ready"), "Error 802: not ready", "driver"),
    ],
)
def test_what_is_broken_names_cause_and_fix_and_fails(facts: Machine, what: str, fix: str):
    found = report(ONE if facts.gpus else CPU, facts, None)
    broken = finding(found, what)
    assert broken.level == "broken"
    assert re.search(fix, broken.fix)
    assert not found.works
    assert found.findings[0] == broken
    assert "Broken: 1." in render_text(found)


def test_an_extra_may_be_missing_and_is_warned_of_where_it_cannot_serve():
    assert report(TWO, with_package("diffusers", None, base=PAIR), passed("cuda:0,1", 2)).findings == ()
    older = report(TWO, with_package("diffusers", "0.35.1", base=PAIR), passed("cuda:0,1", 2))
    warning = finding(older, "diffusers 0.35.1 is too old: 0.42 or newer")
    assert (warning.level, older.works) == ("warning", True)
    assert f'pip install "{PACK_ROOT}[diffusers]"' in warning.fix


@pytest.mark.parametrize("version", ["2.6.0", "2.6.0a0+ecf3bae", "2.6.0.dev20250101+cu126", "3.0", "git-7f"])
def test_newer_versions_of_any_spelling_are_fine(version):
    assert report(TWO, with_package("torch", version, base=PAIR), passed("cuda:0,1", 2)).works


def test_gpus_that_the_user_hid_are_not_missed():
    facts = replace(PAIR, driver_gpus=8, environment=(("CUDA_VISIBLE_DEVICES", "0,1"),))
    found = report(TWO, facts, passed("cuda:0,1", 2))
    assert found.findings == ()
    assert "CUDA_VISIBLE_DEVICES=0,1" in render_text(found)


@pytest.mark.parametrize(
    ("link", "fix"),
    [
        (LinkCheck("cuda:0,1", failure="Rank 0 was in the collectives of NCCL", timed_out=True), "NCCL_P2P_DISABLE=1"),
        (LinkCheck("cuda:0,1", failure="Rank 1 failed: OutOfMemoryError: CUDA out of memory"), "Free about 1 GiB"),
        (LinkCheck("cuda:0,1", failure="Rank 1 failed while in the collectives of gloo: x"), "loopback"),
        (LinkCheck("cuda:0", failure="Rank 0 failed while taking GPU 0: x"), "nvidia-smi"),
        (LinkCheck("cpu:0,1", failure="Rank 1 ended with exit code 7", output="Traceback"), "lo is up"),
        (LinkCheck("cpu:0,1", failure="rank 0 was importing torch", timed_out=True), "--limit 300"),
        (LinkCheck("cpu:0,1", failure="The check could not start: [Errno 28] No space left"), "Make room"),
    ],
)
def test_a_failed_check_is_broken_with_a_fix_that_fits(link, fix):
    found = report(TWO if "cuda" in link.devices else CPU, PAIR, link)
    broken = finding(found, re.escape(link.failure))
    assert broken.level == "broken"
    assert fix in broken.fix
    assert f"failed on {link.devices}" in render_text(found)


def test_the_oldest_versions_are_those_that_an_install_asks_for():
    project = tomllib.loads((PACK_ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["diffusers"]]
    bounds = {name: oldest for name, _, oldest in (line.partition(">=") for line in asked)}
    assert bounds.keys() == OLDEST.keys() - set(OF_COMFYUI)
    assert {name for name, oldest in bounds.items() if oldest != OLDEST[name]} == {"packaging"}  # any that there is


def test_the_rank_that_failed_first_of_its_own_is_to_blame(tmp_path):
    write = {
        0: [{"time": 1, "stage": "joining"}, {"time": 2, "failure": "RuntimeError: Connection closed by peer"}],
        1: [{"time": 1, "stage": "taking GPU 1"}, {"time": 3, "failure": "OutOfMemoryError: full"}],
    }
    for rank, entries in write.items():
        lines = "\n".join(json.dumps(entry) for entry in entries)
        (tmp_path / f"rank-{rank}.jsonl").write_text(lines + '\n{"time": 4, "st')  # killed while it wrote
    outcome = judge([read_account(tmp_path, rank) for rank in (0, 1)], 1, 60, "a\nb")
    assert outcome.failure == "Rank 1 failed while taking GPU 1: OutOfMemoryError: full"
    outcome = judge([read_account(tmp_path, 2)], 1, 60, "")
    assert "torchrun" in (outcome.failure or "")


@pytest.fixture
def faked(monkeypatch):
    """main() with facts and outcome of a check given; returns the exit code."""

    def run(arguments: list[str], facts: Machine, outcome: LinkCheck | None = None) -> int:
        monkeypatch.setattr("sys.argv", ["doctor", *arguments])
        monkeypatch.setattr(doctor.signal, "signal", lambda *_: None)
        monkeypatch.setattr(doctor, "read_machine", lambda limit: facts)
        monkeypatch.setattr(doctor, "check", lambda spec, limit: outcome)
        return doctor.main()

    return run


def test_exit_codes_tell_working_broken_and_wrong_arguments(faked, capsys):
    assert faked([], PAIR, passed("cuda:0,1", 2)) == 0
    assert faked([], PAIR, LinkCheck("cuda:0,1", failure="Rank 1 ended with exit code 7")) == 1
    capsys.readouterr()
    assert faked(["--devices", "2"], PAIR) == 2
    assert "asks for GPU 2, but ComfyUI sees 2 GPUs" in capsys.readouterr().err
    for wrong in (["--devices", "first"], ["--limit", "0"], ["--jsn"]):
        with pytest.raises(SystemExit) as ended:
            faked(wrong, PAIR)
        assert ended.value.code == 2


def test_a_gpu_that_only_torch_does_not_see_is_broken_and_no_wrong_argument(faked, capsys):
    assert faked(["--devices", "1"], replace(machine(), driver_gpus=2)) == 1
    assert "built without CUDA" in capsys.readouterr().out


def test_without_torch_the_report_still_comes_and_no_rank_is_started(faked, capsys, monkeypatch):
    broken = with_package("torch", None, base=machine())
    assert faked([], broken, passed("cpu:0,1", 2)) == 1
    said = capsys.readouterr().out
    assert "package torch is missing" in said
    assert "not run, see Findings" in said


def test_json_holds_the_text_and_every_fact(faked, capsys):
    assert faked(["--json"], PAIR, passed("cuda:0,1", 2)) == 0
    data = json.loads(capsys.readouterr().out)
    found = report(TWO, PAIR, passed("cuda:0,1", 2))
    assert data["works"] is True
    assert data["text"] == render_text(found)
    assert Machine.from_mapping(data["machine"]) == PAIR


def test_the_documentation_explains_every_kind_of_finding():
    page = (Path(PACK_ROOT) / "docs" / "doctor.md").read_text()
    for topic in ("P2P", "/dev/shm", "unlike", "Other processes", "built without CUDA", "does not import", "bfloat16"):
        assert topic in page, topic
