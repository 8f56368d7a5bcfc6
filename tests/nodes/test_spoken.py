"""Plans, refusals, errors and the doctor's report in three languages: by sentence and values, never by looking."""

from __future__ import annotations

import itertools
import json
import re
import time
from dataclasses import replace

import pytest

from benchmarks.flux_facts import FLUX_DEV
from nodes.panel.settings import LANGUAGES
from nodes.run_notices import IN_TURN
from nodes.spoken import TABLES, in_language, read_table
from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import ConfigurationError, PoolError
from parallel_runtime.networks.tables.image import CONVOLVES
from parallel_runtime.planning.explanation import explain
from parallel_runtime.planning.wish import TYPICAL, Wish
from parallel_runtime.requests.facts import CPU, GIB, HOST_MEMORY, PCIE, known_gpu
from parallel_runtime.said import Said, said, together
from tests.nodes.english_alone import ALONE
from tests.nodes.said_templates import templates

OTHERS = [language for language in LANGUAGES if language != "en"]
SEPARATORS = {", ", "; ", " Or: ", " and "}
FOR_DEVELOPERS = {"report.py", "actions.py"}
UNET = replace(FLUX_DEV, title="SDXL", why_whole=CONVOLVES, has_stages=False, heads=1)
SMALL = known_gpu("NVIDIA GeForce RTX 4090", 22 * GIB, PCIE)
CROWDED = replace(SMALL, free_each=(12 * GIB,))
LARGE = known_gpu("NVIDIA H200", 140 * GIB, PCIE)
ROUTED = replace(SMALL, link=replace(HOST_MEMORY, route=4.0))
CONFIGS = (
    {}, {"pipe": 2}, {"pipe": 4, "patches": 4}, {"ring": 2}, {"ulysses": 2}, {"data": 2}, {"may_change_pixels": True},
    {"weights": "dealt"}, {"weights": "host"}, {"weights": "host", "resident": 2},
    {"weights": "host", "resident": 2, "held": (20, 0)},
)  # fmt: skip
_ENGLISH = re.compile(r"\b(?!faster, slightly different)[a-z]{2,},? [a-z]{2,} [a-z]{2,}\b")
_NAMES = re.compile(r"\*[^*]+\*|git lfs pull|pip install -r")


def is_english(text: str) -> bool:
    """Whether three words in a row are, and no name of a button or a command."""
    return bool(_ENGLISH.search(_NAMES.sub("", text)))


def plan_texts() -> set[Said]:
    texts = set()
    for wish, ranks, model, machine in itertools.product(
        CONFIGS, (1, 2, 3, 8), (FLUX_DEV, UNET), (CPU, SMALL, CROWDED, LARGE, ROUTED)
    ):
        for batch in (1, 3):
            try:
                texts.add(explain(Wish(ParallelConfig(**wish), ranks, model, replace(TYPICAL, batch=batch), machine)))
            except ConfigurationError as refusal:
                texts.add(refusal.said)
    return texts


@pytest.fixture(scope="module")
def said_by_the_code() -> dict[str, str]:
    found = templates()
    assert len(found) > 500
    return found


@pytest.mark.parametrize("language", OTHERS)
def test_every_sentence_of_the_code_is_in_the_table(said_by_the_code, language):
    table = read_table(language)
    missing = {text: file for text, file in said_by_the_code.items() if text not in table and text not in ALONE}
    assert missing == {}, "write them into web/said/*.json, or into tests/nodes/english_alone.py"


@pytest.mark.parametrize("language", OTHERS)
def test_no_sentence_of_a_table_is_half_english(language):
    names = re.compile(r"\*[^*]+\*|git lfs pull|-m pip install|image embedder")
    half = re.compile(r"\b[a-z]{2,} [a-z]{2,}\b|[^\x00-\x7f].*[.]$")
    assert not [each for each in read_table(language).values() if half.search(names.sub("", each))]


@pytest.mark.parametrize("language", OTHERS)
def test_tables_hold_what_the_code_says_with_the_same_values(said_by_the_code, language):
    table = read_table(language)
    assert table.keys() - said_by_the_code.keys() - SEPARATORS == set()
    places = {text: (sorted(set(re.findall(r"\{\w+\}", each))) for each in (text, table[text])) for text in table}
    assert [text for text, (ours, theirs) in places.items() if ours != theirs] == []
    assert [text for text, other in table.items() if is_english(other)] == []


def test_what_is_english_alone_is_said_and_in_no_table(said_by_the_code):
    assert ALONE - said_by_the_code.keys() == set()
    assert ALONE & {text for language in OTHERS for text in read_table(language)} == set()


def test_sentences_speak_of_devices_and_workers_and_not_of_how_they_work(said_by_the_code):
    """The doctor's report and the panel's actions may."""
    of_nodes = [text for text, file in said_by_the_code.items() if file not in FOR_DEVELOPERS]
    words = re.compile(r"(?i)\b(ranks?|pools?|park(s|ed)?|dealt)\b")
    assert [text for text in of_nodes if words.search(re.sub(r"\{\w+\}", "", text))] == []


@pytest.mark.parametrize("language", OTHERS)
def test_plans_leave_no_english(language):
    texts = plan_texts() | {together(IN_TURN)}
    assert len(texts) > 100
    left = {str(text): in_language(text, language) for text in texts}
    assert {text: spoken for text, spoken in left.items() if is_english(spoken)} == {}


def test_english_is_the_text_itself_and_another_language_has_english():
    for text in plan_texts():
        assert in_language(text, "en") == text
        assert in_language(text, "fr") == text


def test_values_come_along_as_they_are():
    text = said(
        "The workers cannot carry {what}.",
        what=together((said("a replaced {name}", name="diffusion_model.x"), said("wrapped weights")), ", "),
    )
    assert in_language(text, "zh") == "工作进程无法承载：被替换的 diffusion_model.x，被包装的权重。"
    path = "One device computes everything."  # of a file, which is no sentence of ours
    error = PoolError(said("{path} does not exist.", path=path), "Restart ComfyUI.")
    assert path in in_language(error.said, "zh")


def test_a_text_of_any_length_is_said_at_once():
    """Looking for the sentences in the text itself, 40 of one took 216 s."""
    sentence = said("The model {name} is not in ComfyUI's {value} folders.", name="a, b", value="checkpoints")
    begin = time.perf_counter()
    in_language(together([sentence] * 2000), "zh")
    in_language("The model a, b is not in ComfyUI's checkpoints folders. " * 2000, "zh")
    assert time.perf_counter() - begin < 1


def test_tables_are_files_that_the_canvas_can_read():
    for language in OTHERS:
        table = json.loads((TABLES / f"{language}.json").read_text(encoding="utf-8"))
        assert all(isinstance(text, str) for text in table.values())
