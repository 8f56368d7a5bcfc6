"""Plans and refusals in three languages: the tables agree, and leave no English in what the artist reads."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest

from nodes.config_meaning import explain_limits
from nodes.model_nodes import MODEL_NODES, How
from nodes.panel.settings import LANGUAGES
from nodes.run_notices import IN_TURN, USE_PARALLEL_SAMPLER
from nodes.sentences import read_table, translated
from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import ConfigurationError
from parallel_runtime.planning.explanation import details_of, explain
from parallel_runtime.planning.plan import TYPICAL
from parallel_runtime.requests.facts import CPU, FLUX_DEV, GIB, PCIE, known_gpu

UNET = replace(FLUX_DEV, title="SDXL", splits_sequence=False, has_stages=False, heads=1)
SMALL = known_gpu("NVIDIA GeForce RTX 4090", 22 * GIB, PCIE)
CROWDED = replace(SMALL, free_bytes=12 * GIB)
LARGE = known_gpu("NVIDIA H200", 140 * GIB, PCIE)
CONFIGS = (
    {}, {"pipe": 2}, {"pipe": 4, "patches": 4}, {"ring": 2}, {"ulysses": 2}, {"data": 2}, {"may_change_pixels": True},
    {"weights": "dealt"}, {"weights": "host"}, {"weights": "host", "resident": 2, "dealt": 20},
)  # fmt: skip
ENGLISH = re.compile(r"\b(?!faster, slightly different)[a-z]{2,},? [a-z]{2,} [a-z]{2,}\b")


def plan_texts() -> set[str]:
    texts = set()
    for wish, ranks, model, machine in itertools.product(
        CONFIGS, (1, 2, 3, 8), (FLUX_DEV, UNET), (CPU, SMALL, CROWDED, LARGE)
    ):
        for batch in (1, 3):
            try:
                texts.add(explain(ParallelConfig(**wish), ranks, model, replace(TYPICAL, batch=batch), machine))
            except ConfigurationError:
                continue  # a refusal is no plan
    return texts


def refusals() -> set[str]:
    return {node.why for node in MODEL_NODES.values() if node.how is How.REFUSED}


def values(sentence: str) -> list[str]:
    return sorted(re.findall(r"\{\w+\}", sentence))


def test_each_code_has_a_sentence_with_the_same_values_in_three_languages():
    english = read_table("en")
    for language in LANGUAGES:
        table = read_table(language)
        assert table.keys() == english.keys()
        assert {code: values(text) for code, text in table.items()} == {c: values(t) for c, t in english.items()}


@pytest.mark.parametrize("language", ["zh", "ja"])
def test_plans_and_refusals_leave_no_english(language):
    texts = plan_texts() | refusals() | {IN_TURN, USE_PARALLEL_SAMPLER}
    texts |= {explain_limits(details_of(ParallelConfig(), 2, model, TYPICAL, CPU)) for model in (FLUX_DEV, UNET)}
    assert len(texts) > 100
    left = {text: translated(text, language) for text in texts}
    assert {text: said for text, said in left.items() if ENGLISH.search(said)} == {}


def test_what_no_pattern_knows_stays_and_english_is_untouched():
    assert translated("A sentence that nobody wrote.", "zh") == "A sentence that nobody wrote."
    for text in plan_texts():
        assert translated(text, "en") == text
    assert translated("One rank computes everything.", "fr") == "One rank computes everything."
    log = "One rank computes everything. " * 200
    assert translated(log, "zh") == log  # 6000 characters would hold up ComfyUI's event loop
    assert translated(log[:30], "zh") != log[:30]


def test_values_come_along_and_are_translated_themselves():
    text = "The pool cannot carry a replaced diffusion_model.x, wrapped weights."
    assert translated(text, "zh") == "进程池无法承载：被替换的 diffusion_model.x，被包装的权重。"
    assert "my.model v1.safetensors" in translated(
        "With my.model v1.safetensors, ulysses can be up to 8, its attention heads.", "ja"
    )
