"""Texts keep the sentence and the values that they were made of, through errors and over the wire."""

from __future__ import annotations

import pytest

from parallel_runtime.errors import PoolError, RequestError
from parallel_runtime.requests.requests import Finished
from parallel_runtime.said import Said, as_said, said, together
from workers.wire.frames import FrameError, decode_header, encode_header
from workers.wire.protocol import Done, Failed, describe, of_all_ranks, revive

NESTED = said("{plan}: {how}.", plan="ulysses 2", how=together((said("{n} heads", n=4), said("the CPU")), "; "))


def travel(message: Failed | Done) -> Failed | Done:
    return decode_header(encode_header(message), 0)


def parts(text: str) -> object:
    return as_said(text).to_data()


def test_a_text_is_its_english_and_remembers_what_it_is_made_of():
    assert NESTED == "ulysses 2: 4 heads; the CPU."
    assert NESTED.template == "{plan}: {how}."
    assert NESTED.values["plan"] == "ulysses 2"
    assert parts(Said.from_data(NESTED.to_data())) == parts(NESTED)
    assert together(("", said("a"), "")) == "a"


def test_braces_in_a_value_are_no_places():
    assert said("{path} is {what}.", path="{what}/{0}", what="empty") == "{what}/{0} is empty."


def test_an_errors_sentences_have_the_values_that_they_name():
    error = RequestError("{path} is {what}.", "Choose another than {path}.", path="{what}", what=NESTED)
    assert parts(error.cause) == parts(said("{path} is {what}.", path="{what}", what=NESTED))
    assert parts(error.fix) == parts(said("Choose another than {path}.", path="{what}"))
    assert parts(RequestError(NESTED, "", plan="1").cause) == parts(NESTED)


@pytest.mark.parametrize("data", [[1, "a", {}], ["a", "a"], ["a", "a", 3], {"a": 1}, 7, ["a", "a", {"b": 3}]])
def test_what_is_no_text_is_refused(data):
    with pytest.raises(TypeError):
        Said.from_data(data)


def test_errors_and_plans_cross_the_wire_with_their_parts():
    error = RequestError(NESTED, "Restart ComfyUI.")
    failed = travel(Failed(1, 0, describe(error, 0)))
    revived = revive(failed.error)
    assert (type(revived), parts(revived.cause), parts(revived.fix)) == (
        RequestError,
        parts(NESTED),
        parts("Restart ComfyUI."),
    )
    done = travel(Done(1, 0, Finished(plan=NESTED)))
    assert parts(done.answer.plan) == parts(NESTED)


def test_a_plain_english_text_crosses_too():
    failed = travel(Failed(1, 0, describe(PoolError("It ended.", ""), 0)))
    assert revive(failed.error).cause == "It ended."


def test_an_error_of_all_ranks_is_known_by_its_sentence_and_not_by_its_text():
    told = of_all_ranks(describe(ValueError("Worker 1 failed with it."), 1), "pool.log")
    assert told.cause == "The model failed with ValueError: Worker 1 failed with it."
    assert told.cause.values == {"error": "ValueError: Worker 1 failed with it"}


def test_what_is_too_long_or_no_utf_8_travels_as_plain_text():
    info = describe(PoolError(said("{path} is gone.", path="\udcff" + "x" * 9000), ""), None)
    assert len(info.cause) <= 4010
    travel(Failed(1, 0, info))


def test_damaged_parts_are_a_frame_error():
    raw = encode_header(Failed(1, 0, describe(PoolError(NESTED, ""), 0))).replace(b"{plan}: {how}.", b"\xc1" * 14)
    with pytest.raises(FrameError):
        decode_header(raw, 0)
