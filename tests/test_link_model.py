"""What is reckoned for cards without NVLink: near what two H100s did, and the same in the document."""

from pathlib import Path

import pytest

from benchmarks.link_model import FORBIDDEN, JOBS, Split, checked, speed_up, splits, table, through_host
from parallel_runtime.requests.facts import NVLINK


@pytest.mark.parametrize("job", [job for job in JOBS if job.measured], ids=lambda job: job.model.title)
def test_two_cards_with_nvlink_are_predicted_as_they_were_measured(job):
    assert speed_up(job, "H100", 2, NVLINK) == pytest.approx(job.measured, rel=0.15)


@pytest.mark.parametrize("job", [job for job in JOBS if job.forbidden], ids=lambda job: job.model.title)
def test_and_so_are_two_whose_nvlink_is_forbidden(job):
    assert speed_up(job, "H100", 2, through_host(FORBIDDEN)) == pytest.approx(job.forbidden, rel=0.15)


def test_more_cards_are_never_slower_and_a_faster_slot_neither():
    for job in JOBS:
        slow, fast = (speed_up(job, "RTX 4090", 2, through_host(rate)) for rate in (0.5, 13.0))
        assert 1 <= slow <= fast <= speed_up(job, "RTX 4090", 4, through_host(13.0))


def test_the_documents_have_the_tables():
    root = Path(__file__).resolve().parents[1]
    text = (root / "docs" / "slow-links.md").read_text(encoding="utf-8")
    assert table() in text
    assert checked() in text
    results = (root / "benchmarks" / "results" / "host_route.md").read_text(encoding="utf-8")
    assert splits(2, False, ("RTX 3090", "RTX 4090"), ("x4", "x8")) in results


def test_a_split_gives_what_auto_takes_where_that_is_faster_than_one_card():
    flux = JOBS[0]
    assert Split(flux, "RTX 3090", 2, 8.0).speed_ups()[0] == speed_up(flux, "RTX 3090", 2, through_host(8.0)) > 1


def test_gathering_moves_three_quarters_as_much_over_two_cards_and_as_much_over_three():
    """Over a link so slow that nothing hides it."""
    flux = JOBS[0]
    for count, sixteen, eight in ((2, 4 / 3, 2), (3, 1, 8 / 5)):
        for eight_bit, more in ((False, sixteen), (True, eight)):
            today, gathered = Split(flux, "RTX 4090", count, 1e-3, eight_bit).speed_ups()
            assert gathered / today == pytest.approx(more, rel=0.01)
