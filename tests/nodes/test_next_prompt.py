"""When ranks begin with the next prompt: where it is the running one with another seed, and nothing else waits."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from nodes.next_prompt import MOST_MISSED, NextPrompt, Prompt, other_seed, read_queue


def graph(seed: int, text: str = "a cat", **more: object) -> dict[str, dict[str, object]]:
    return {
        "text": {"class_type": "CLIPTextEncode", "inputs": {"text": text, "clip": ["clip", 1]}},
        "sampler": {"class_type": "KSampler", "inputs": {"seed": seed, "steps": 7, "positive": ["text", 0], **more}},
    }


@pytest.mark.parametrize(
    ("other", "wanted"),
    [
        (graph(8), (7, 8)),
        (graph(7), None),  # nothing differs
        (graph(8, "a dog"), None),
        (graph(8, steps=8), (7, 8)),  # whose number it is, the loop knows
        (graph(8, steps=9), None),
        (graph(7, steps="8"), None),
        (graph(7, steps=True), None),
        (graph(7.5), None),
        (graph(8, more=1), None),
        ({"sampler": graph(8)["sampler"]}, None),
        ({**graph(8), "more": {"class_type": "SaveImage", "inputs": {}}}, None),
        ({**graph(8), "text": {**graph(8)["text"], "class_type": "Other"}}, None),
        (graph(8, positive=["text", 1]), None),
    ],
)
def test_prompts_that_differ_in_one_number(other, wanted):
    assert other_seed(graph(7), other) == wanted


class Server:
    """ComfyUI's queue, and pools that note what they are to begin with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.queue: tuple[Prompt | None, Prompt | None] = (None, None)
        self.begun: list[int] = []  # seeds
        self.able = True
        self.next = NextPrompt(lambda: self.queue)
        self.patch = monkeypatch

    def prepare(self, seed: int, another: int):
        def start() -> bool:
            self.begun.append(another)
            return True

        return start if self.able and seed == self.seed else None

    def run(self, seed: int, then: int | None, uses: int = 2, served: bool | None = None, **more) -> None:
        """A prompt whose pools do so much; the first is a loop."""
        self.seed = seed
        coming = None if then is None else Prompt(f"id {then}", graph(then, **more))
        self.queue = Prompt(f"id {seed}", graph(seed, **more)), coming
        was = seed in self.begun if served is None else served
        for use in range(uses):
            self.next.used(self.prepare if use == 0 else None, was and use == 0)


@pytest.fixture
def server(monkeypatch):
    return Server(monkeypatch)


def test_they_begin_when_as_much_was_done_as_for_the_last_prompt(server):
    server.run(1, 2)
    assert server.begun == []  # nobody knows yet what comes behind the loop
    server.run(2, 3, uses=1)
    assert server.begun == []
    server.next.used()
    assert server.begun == [3]
    server.run(3, 4)
    assert server.begun == [3, 4]
    server.run(4, None)
    assert server.begun == [3, 4]


def test_another_text_is_no_other_work_and_other_nodes_are(server):
    server.run(1, None, text="a dog")
    server.run(2, 3)
    assert server.begun == [3]
    server.queue = Prompt("other", {"a": {"class_type": "KSampler", "inputs": {"seed": 3}}}), None
    server.next.used()
    server.run(4, 5)
    assert server.begun == [3]


def test_the_prompt_they_begin_with_is_the_next_when_it_comes_to_that(server):
    server.run(1, 2)
    server.run(2, 3, uses=1)
    server.queue = server.queue[0], Prompt("another", graph(9))  # it was put in front
    server.next.used()
    assert server.begun == []


def test_a_loop_whose_noise_is_not_of_the_seed_is_not_begun(server):
    server.run(1, 2)
    server.able = False
    server.run(2, 3)
    assert server.begun == []


def test_prompts_that_ask_for_something_else_each_time_end_it_until_other_nodes_come(server):
    for seed in range(1, 9):
        server.run(seed, seed + 1, served=False)
    assert len(server.begun) == MOST_MISSED
    server.queue = Prompt("other", {}), None
    server.next.used()
    server.run(20, 21)
    server.run(21, 22)
    assert server.begun[-1] == 22


def test_one_that_was_served_counts_anew(server):
    server.run(1, 2)
    for seed in range(2, 12):
        server.run(seed, seed + 1, served=seed % 2 == 0)
    assert len(server.begun) == 10


def test_it_can_be_switched_off(server, monkeypatch):
    monkeypatch.setenv("PARALLEL_DIT_OFF", "ahead")
    for seed in range(1, 4):
        server.run(seed, seed + 1)
    assert server.begun == []


class Queued:
    """ComfyUI's PromptQueue: a heap, of which the first item alone is in order."""

    def __init__(self, running: list[int], waiting: list[int]):
        self.read = [self.item(number) for number in running], [self.item(number) for number in waiting]

    def item(self, number: int) -> tuple[object, ...]:
        return (number, f"id {number}", graph(number), {}, ["sampler"])

    def get_current_queue_volatile(self):
        return self.read


@pytest.mark.parametrize(
    ("queue", "wanted"),
    [
        (Queued([1], [2, 9, 3]), ("id 1", "id 2")),
        (Queued([1], [7, -4]), ("id 1", "id -4")),  # put in front
        (Queued([1], []), ("id 1", None)),
        (Queued([], [2]), (None, "id 2")),
        (Queued([1, 2], [3]), (None, "id 3")),  # who knows which of them asks
        (object(), (None, None)),  # of a ComfyUI to come
    ],
)
def test_the_queue_as_comfyui_has_it(monkeypatch, queue, wanted):
    server = SimpleNamespace(PromptServer=SimpleNamespace(instance=SimpleNamespace(prompt_queue=queue)))
    monkeypatch.setitem(sys.modules, "server", server)
    running, coming = read_queue()
    assert (running and running.id, coming and coming.id) == wanted
    assert coming is None or coming.graph == graph(int(coming.id.split()[1]))


def test_where_no_server_runs_nothing_waits(monkeypatch):
    monkeypatch.delitem(sys.modules, "server", raising=False)
    assert read_queue() == (None, None)
