"""What typed errors and the doctor say is in Chinese and Japanese: read from the code that makes them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodes.sentences import translated
from parallel_runtime.errors import ERROR_TYPES
from tests.nodes.english_sentences import ALONE, PUT_TOGETHER

PACK = Path(__file__).parents[2]
SPOKEN = {**dict.fromkeys([*ERROR_TYPES, "ParallelError"], 0), "Finding": 1, "ErrorInfo": 1}
"""What is made with a cause and a fix, and which argument the cause is."""
WHOLE = (
    "GPU 0 (NVIDIA H200) (rank 1) ran out of memory when it wanted 2.00 GiB more; 0.3 GiB were free there afterwards.",
    "The CPU (rank 1) ran out of memory; 0.3 GiB were free there afterwards.",
    "A picture of 4096 tokens, with activations of at least 1.2 GiB, needs 44.3 GiB on GPU 0 (rank 0), "
    "where 22.0 GiB are free. Use a smaller picture or batch, set ulysses or stages to more GPUs, or "
    "free memory on that device. Or: Set weights in Parallel Config to dealt or host: then the weights "
    "take less of it.",
    "FLUX.1 needs 44.3 GiB on GPU 0 (rank 0), where 22.0 GiB are free. It fits on the others: set "
    "devices to 1,2 in Parallel Config.",
    "Rank 1 (process 4242) ended in the middle of a job. The next prompt starts a fresh pool; the log is "
    "/a b/pool v1.log.",
    "Rank 0 (process 42 on 10.0.0.2) ended while the pool started. The log is /tmp/pool.log.",
    "Rank 1 (process 4242) made no progress for 61 seconds in the middle of a job. The next prompt "
    "starts a fresh pool; the log with the stacks of all ranks is /a/pool.log.",
    "Host b (10.0.0.2) dropped off while the pool was idle. The next prompt starts a fresh pool; no log "
    "could be written in /a.",
    "Rank 0 of the worker pool failed with RuntimeError: shapes differ. The next prompt starts a fresh "
    "pool; the log is /a.",
    "The worker pool failed with OSError: full. The log is /a.",
    "No folder for temporary files could be made in /tmp: No space left.",
    "The degrees cfg 2 × ulysses 2 need 4 ranks, and 1 rank is there.",
    "The degrees cfg 2 × ulysses 2 need 4 ranks, and 2 ranks are there. Valid is, for example: cfg 2.",
    "A picture of one token cannot be shared out over 2 ranks: each needs one.",
    "A latent of 6 token rows cannot be cut into 8 patches. Set patches to auto, or to a number from 1 "
    "to 6, or make a larger picture.",
    "A latent of one token row, or a video of odd latent height, cannot be cut into 2 patches in which "
    "each of the 2 ranks of a stage has a token. Set patches to auto, or to a number 1, or make a larger "
    "picture.",
    "Other processes use 3.0 GiB of GPU 0's 139.8 GiB.",
    "The GPUs' memories differ: GPU 1 has 22.0 GiB, the largest has 139.8 GiB.",
    "1.0 GiB of host memory is available, and 2 ranks may take 4.0 GiB.",
    "The pool has one GPU: there is nothing to split; what makes one GPU faster is compile in Parallel Config.",
)
"""As artists get them."""
_NAMES = re.compile(r"\*[^*]+\*|git lfs pull")  # of a button and of a command, which stay
_SENTENCE = re.compile(r"(?<=[.!?]) (?=[A-Z])")


def sample(node: ast.expr) -> str | None:
    """A text as the code makes it, with 7 for every value; None where it is made elsewhere."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "7" for part in node.values]
        return "".join(str(part) for part in parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = [sample(side) for side in (node.left, node.right)]
        return None if None in sides else "".join(map(str, sides))
    return None


def sentences_of(file: Path) -> Iterator[str]:
    """Every text that one file gives an error or a finding."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    named: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            named.setdefault(node.targets[0].id, []).append(node.value)
    for node in ast.walk(tree):
        told: list[ast.expr] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in SPOKEN:
            first = SPOKEN[node.func.id]
            told = node.args[first : first + 2]
        elif isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple) and file.name == "limits.py":
            told = node.value.elts
        for text in told:
            for value in named.get(text.id, []) if isinstance(text, ast.Name) else [text]:
                if said := sample(value):
                    yield from _SENTENCE.split(said)


def is_english(text: str) -> bool:
    """Whether three words in a row are."""
    return bool(re.search(r"\b[a-z]{2,},? [a-z]{2,} [a-z]{2,}\b", _NAMES.sub("", text)))


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """Sentence -> a file that says it."""
    files = [file for folder in ("nodes", "workers", "parallel_runtime") for file in (PACK / folder).rglob("*.py")]
    found = {sentence: file.name for file in sorted(files) for sentence in sentences_of(file)}
    assert len(found) > 300
    return found


@pytest.mark.parametrize("language", ["zh", "ja"])
def test_every_sentence_has_a_translation_or_stands_in_the_list(said, language):
    english = {}
    for sentence, file in said.items():
        other = translated(sentence, language)
        if (
            sentence not in ALONE | PUT_TOGETHER
            and re.search("[a-z]{3}", sentence)
            and (other == sentence or is_english(other))
        ):
            english[sentence] = file
    assert english == {}, (
        "write them into locales/*/errors.json or doctor.json, or into tests/nodes/english_sentences.py"
    )


@pytest.mark.parametrize("language", ["zh", "ja"])
def test_what_is_put_together_of_parts_is_translated_whole(language):
    assert [text for text in WHOLE if is_english(translated(text, language))] == []


def test_the_lists_hold_only_what_is_said_and_has_no_translation(said):
    listed = ALONE | PUT_TOGETHER
    assert listed - said.keys() == set()
    assert {
        each for each in listed if translated(each, "zh") != each and not is_english(translated(each, "zh"))
    } == set()


@pytest.mark.parametrize("language", ["zh", "ja"])
def test_the_doctors_report_is_translated_line_by_line(language):
    for report in (PACK / "docs" / "doctor.md").read_text(encoding="utf-8").split("```")[1::2]:
        other = translated(report, language)
        assert other.count("\n") == report.strip("\n").count("\n")
        assert not is_english(other)
