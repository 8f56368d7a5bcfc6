"""What is reckoned for cards without NVLink: near what H100s and H200s did, and the same in the document."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.link_model import (
    BOTH,
    JOBS,
    _twice_as_fast,
    checked,
    in_bytes,
    speed_up,
    table,
    through_host,
)
from parallel_runtime.requests.facts import INT8, NVLINK


@pytest.mark.parametrize("job", [job for job in JOBS if job.measured], ids=lambda job: job.model.title)
def test_two_cards_with_nvlink_are_predicted_as_they_were_measured(job):
    assert speed_up(job, "H100", 2, NVLINK) == pytest.approx(job.measured, rel=0.15)


@pytest.mark.parametrize(
    ("job", "rate"), [pytest.param(job, rate, id=f"{job.model.title} {rate}") for job in JOBS for rate in job.forbidden]
)
def test_and_so_are_two_whose_nvlink_is_forbidden(job, rate):
    assert speed_up(job, "H200", 2, through_host(rate), BOTH) == pytest.approx(job.forbidden[rate], rel=0.15)


def test_a_slot_in_which_two_were_slower_than_one_leaves_the_other_out():
    slower = [(job, rate) for job in JOBS for rate, measured in job.forbidden.items() if measured < 1]
    assert len(slower) == 2
    assert all(speed_up(job, "H200", 2, through_host(rate)) == 1 for job, rate in slower)


def test_more_cards_are_never_slower_and_a_faster_slot_neither():
    for job in JOBS:
        slow, fast = (speed_up(job, "RTX 4090", 2, through_host(rate)) for rate in (0.5, 13.0))
        assert 1 <= slow <= fast <= speed_up(job, "RTX 4090", 4, through_host(13.0))


def test_the_documents_have_the_tables():
    root = Path(__file__).resolve().parents[1]
    text = (root / "docs" / "slow-links.md").read_text(encoding="utf-8")
    assert table() in text
    assert checked() in text
    assert in_bytes() in text


def test_quantised_files_on_two_cards_gain_from_a_faster_slot_and_from_inputs_that_travel():
    flux = JOBS[0]
    whole = replace(flux.model, bytes_per_parameter=1, parallel_blocks=0)
    slow, fast = (_twice_as_fast(flux, whole, "RTX 4090", rate) for rate in (1.0, 13.0))
    assert 1 == slow < fast < 2
    half = replace(whole, takes=INT8)
    of_heads = replace(whole, projecting_blocks=0)
    found = [_twice_as_fast(flux, model, "RTX 4090", 8.0) for model in (of_heads, whole, half)]
    assert found == sorted(set(found))
