"""A bell tells of one message at a time, whole or not at all."""

from __future__ import annotations

import threading

import pytest

from workers.client.patience import Patience
from workers.wire import bell
from workers.wire.bell import BELL_BYTES, Bell


@pytest.fixture
def sides():
    """The same memory as two processes see it."""
    memory = memoryview(bytearray(BELL_BYTES))
    return Bell(memory), Bell(memory)


def test_the_last_message_is_seen_under_its_number_alone(sides):
    ours, theirs = sides
    assert theirs.look(1) is None
    ours.ring(1, b"first, and longer")
    assert theirs.look(1) == b"first, and longer"
    ours.ring(2, b"second")
    assert [theirs.look(number) for number in (0, 1, 2, 3)] == [None, None, b"second", None]
    theirs.close()
    assert theirs.look(2) is None
    theirs.ring(3, b"into nothing")
    assert ours.look(2) == b"second"


def test_a_message_that_is_too_long_is_left_to_the_sockets(sides):
    ours, theirs = sides
    ours.ring(1, b"x" * BELL_BYTES)
    assert theirs.look(1) is None
    ours.ring(2, b"x" * (BELL_BYTES - 16))
    assert theirs.look(2) == b"x" * (BELL_BYTES - 16)


def test_it_is_silent_where_writes_may_be_seen_out_of_order(sides, monkeypatch):
    monkeypatch.setattr(bell, "_IN_ORDER", False)
    sides[0].ring(1, b"message")
    assert sides[1].look(1) is None


def test_who_looks_while_it_rings_gets_all_of_a_message_or_nothing(sides):
    ours, theirs = sides
    last = 20_000

    def ring() -> None:
        for number in range(1, last + 1):
            ours.ring(number, bytes([number % 251]) * 3000)

    thread = threading.Thread(target=ring)
    thread.start()
    seen = set()
    number = 1
    while number < last:
        number = max(int(theirs._words[0]), number)
        message = theirs.look(number)
        if message is not None:
            assert message == bytes([number % 251]) * 3000
            seen.add(number)
    thread.join()
    assert seen


def test_a_client_looks_all_the_time_when_an_answer_is_due_and_seldom_otherwise():
    patience = Patience()
    for _ in range(3):
        patience.took(1, 0.070)
    waited, looks, idle = 0.0, 0, []
    while waited < 60:
        pause = patience.pause(1, waited)
        looks += 1
        idle.append((waited, pause))
        waited += max(pause, 1e-5)
    around = [at for at, pause in idle if pause == 0.0]
    assert 0.0680 < min(around) < 0.0695  # and the first pause led there
    assert 0.0705 < max(around) < 0.0720
    assert looks < 1500
    assert all(pause <= 0.021 * at + 1e-3 for at, pause in idle if at > 0.071)


def test_one_call_that_was_held_up_hardly_changes_when_the_next_is_due():
    patience = Patience()
    patience.took(1, 0.070)
    patience.took(1, 0.074)
    assert patience.pause(1, 0.0) < 0.071
    patience.took(1, 0.060)
    assert patience.pause(1, 0.0) < 0.060
    assert patience.pause(2, 0.060) > 0  # of another kind nothing is known
