"""What the waiting node says, in which order and how soon, and its bar while weights are read."""

from __future__ import annotations

import time
from types import SimpleNamespace

from nodes.panel import settings
from nodes.panel.run_history import RunHistory, RunRecord, Span
from nodes.panel.settings import language_of, read_settings
from nodes.run_notices import RunNotices
from parallel_runtime.requests.requests import Finished, PlanDetails
from parallel_runtime.said import Said
from workers.client.life import Wait


class Node:
    """Holds what is shown on it."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.bars: list[float] = []
        self.now = 0.0
        self.keeper = SimpleNamespace(waits_for=Wait())
        self.history = RunHistory()
        self.notices = RunNotices(
            self.texts.append,
            lambda: self.now,
            move_bar=lambda done, total: self.bars.append(done / total),
            history=self.history,
        )

    def begin(self, doing: str) -> None:
        self.ask = self.notices.watching(self, lambda: False, doing)

    def wait(self, *moments: tuple[float, Wait]) -> None:
        for self.now, self.keeper.waits_for in moments:
            assert not self.ask()

    def spans(self) -> list[tuple[str, float, float]]:
        """What went on, in seconds since the first of it."""
        first = self.history.spans[0].begin
        return [(span.what, round(span.begin - first, 3), round(span.end - first, 3)) for span in self.history.spans]


def test_a_start_a_load_and_a_measurement_are_told_in_their_order_with_a_bar_of_bytes():
    node = Node()
    node.begin("load")
    node.wait(
        (0.0, Wait("start", 0, 2)),
        (0.3, Wait("start", 0, 2)),
        (1.1, Wait("start", 0, 2)),
        (5.0, Wait("start", 1, 2)),
        (6.0, Wait()),
        (6.2, Wait()),
        (6.5, Wait()),
    )
    assert node.texts == [
        "Starting: 0 of 2 devices are ready (0 s).",
        "Starting: 0 of 2 devices are ready (1 s).",
        "Starting: 1 of 2 devices are ready (5 s).",
        "Preparing the model (0 s).",
    ]
    node.wait((7.0, Wait("weights", 0, 24_000_000_000)), (8.0, Wait("weights", 12_000_000_000, 24_000_000_000)))
    assert node.bars == [0.0, 0.5]
    node.wait((9.0, Wait("measuring")), (11.5, Wait("measuring")))
    assert node.texts[-1] == "Measuring kernels and links, once for this machine (2 s)."
    node.notices.end()
    assert node.spans()[1:] == [
        ("start", 0.0, 6.0),
        ("load", 6.0, 7.0),
        ("weights", 7.0, 9.0),
        ("measuring", 9.0, 11.5),
    ]


def test_a_quick_step_says_nothing_and_a_long_one_says_so_before_half_a_second_is_over():
    node = Node()
    node.begin("step")
    node.wait((0.05, Wait()), (0.35, Wait()))
    assert node.texts == []
    node.wait((0.45, Wait()))
    assert node.texts == ["Computing (0 s)."]


def test_what_is_said_of_a_wait_goes_with_it():
    node = Node()
    node.begin("step")
    node.wait((0.0, Wait("compile")), (9.0, Wait("compile")))
    node.notices.end()
    node.begin("step")
    node.wait((9.1, Wait()), (9.2, Wait()))
    assert node.texts[1:] == ["Compiling , once per machine: 9 s.", "Computing (0 s)."]


def test_the_language_is_that_of_the_canvas(tmp_path, monkeypatch):
    file = tmp_path / "comfy.settings.json"
    monkeypatch.setattr(settings, "settings_file", lambda: file)
    assert language_of(read_settings()) == "en"
    for text, language in (
        ('{"Comfy.Locale": "ja"}', "ja"),
        ('{"Comfy.Locale": "zh-TW"}', "zh"),
        ('{"Comfy.Locale": 7}', "en"),
        ("[1, 2]", "en"),
        ("{", "en"),
    ):
        file.write_text(text)
        assert language_of(read_settings()) == language


def details(ulysses: int) -> PlanDetails:
    degrees = {"data": 1, "cfg": 1, "pipe": 1, "ring": 1, "ulysses": ulysses}
    return PlanDetails("FLUX.1", degrees, 1, (57,), 24, 57, 4096, 1)


def sample(history: RunHistory, ulysses: int, seconds: float, latent=(1, 16, 128, 128)) -> str:
    """A run of four steps; returns what the node says then."""
    now = [0.0]
    notices = RunNotices(lambda text: None, lambda: now[0], model="a", where=lambda: ("p", "3"), history=history)
    notices.begin()
    for step in range(4):
        now[0] = seconds * step
        notices.computed()
        notices.ran(Finished(Said(f"ulysses {ulysses}.")), details(ulysses), latent, 4, "call")
    return notices.finish()


def test_the_speed_up_is_told_where_one_rank_was_measured_with_the_same_request():
    history = RunHistory()
    assert sample(history, 2, 0.5) == "500 ms per step. Latent 128 × 128. ulysses 2."
    assert "times" not in sample(history, 1, 1.0)
    said = "500 ms per step. 2.00 times as fast as one device, which took 1.00 s. Latent 128 × 128. ulysses 2."
    assert sample(history, 2, 0.5) == said
    assert "times" not in sample(history, 2, 0.5, latent=(1, 16, 64, 64))
    runs = history.to_mapping()["runs"]
    assert [run["speedup"] for run in runs] == [None, 2.0, None, None]
    assert runs[1]["details"]["degrees"]["ulysses"] == 2
    assert runs[1]["node"] == "3"


def test_a_run_on_one_rank_that_is_older_than_an_hour_is_compared_with_no_other(monkeypatch):
    history = RunHistory()
    sample(history, 1, 1.0)
    assert "times" in sample(history, 2, 0.5)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3601)
    assert "times" not in sample(history, 2, 0.5)


def test_a_run_that_was_stopped_is_not_recorded_and_has_no_speed():
    history, shown = RunHistory(), []
    notices = RunNotices(shown.append, iter(range(10)).__next__, model="a", where=lambda: ("p", "3"), history=history)
    notices.begin()
    for _ in range(2):  # of twenty
        notices.computed()
        notices.ran(Finished(Said("ulysses 2.")), details(2), (1, 16, 128, 128), 20)
    assert notices.finish(whole=False) == ""
    assert shown[-1] == "Stopped before the end."
    assert history.to_mapping()["runs"] == []


def test_a_new_prompt_begins_a_new_time_line_and_a_long_one_is_bounded():
    history = RunHistory()
    for step in range(1000):
        history.span("one", Span("step", "3", step, step + 1))
    timeline = history.to_mapping()["timeline"]
    assert len(timeline) <= 400
    assert timeline[-1]["end"] == 1000
    history.span("two", Span("start", "1", 0, 1))
    assert [span["what"] for span in history.to_mapping()["timeline"]] == ["start"]


def test_no_record_is_made_where_nothing_ran():
    history = RunHistory()
    assert RunNotices(lambda text: None, history=history).finish() == ""
    assert not history.runs
    assert RunRecord("a", "1", "", (1,), 1, None, None, None, 0.0).speedup is None
