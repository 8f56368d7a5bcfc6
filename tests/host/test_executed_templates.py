"""Our examples, and official templates, from loader to sampler in a real ComfyUI, made small: the same latents as with
Load Diffusion Model, and loops where `template_coverage` counts them.

docs/models.md has the table of a larger sample (python -m benchmarks.template_coverage --execute).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable

import pytest

from benchmarks.template_coverage.execution import executable, execute_all
from benchmarks.template_coverage.installed import Template, installed_version, read_templates
from benchmarks.template_coverage.models_page import EXECUTED
from benchmarks.template_coverage.totals import Judged, judge_all

from .browser.examples import EXAMPLES
from .find_host import PACK_ROOT, find_host

pytestmark = [pytest.mark.host, pytest.mark.slow]

NAMES = {
    "parallel-flux-lora", "parallel-flux-kontext-edit", "parallel-wan-2.2-two-experts",
    "parallel-ltx-2-video-with-sound", "parallel-sdxl-checkpoint",
}  # fmt: skip
"""Of CI: a LoRA, a reference, two models, sound out of a checkpoint, a U-Net."""
MORE = {*EXAMPLES, "video_ltx2_5_i2v"} - NAMES
"""Of the tests before a release; the last is of two stages of video with sound."""


def reasons(texts: Iterable[str]) -> set[str]:
    """Of loops, each of which may have several, by commas; a file does not tell a ControlNet's side."""
    return {reason.replace("negative", "positive") for text in texts for reason in text.split(", ")}


def read_examples() -> list[Template]:
    folder = PACK_ROOT / "example_workflows"
    return [Template(name, 0, json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))) for name in EXAMPLES]


def first(judged: list[Judged]) -> list[Judged]:
    return [each for each in judged if each.name in NAMES]


def more(judged: list[Judged]) -> list[Judged]:
    return [each for each in judged if each.name in MORE]


def step_by_step(judged: list[Judged]) -> list[Judged]:
    """Those of which it is counted, as far as they have been executed."""
    executed = {each["name"] for each in json.loads(EXECUTED.read_text(encoding="utf-8"))["executed"]}
    return [each for each in judged if each.steps and each.name in executed]


@pytest.mark.parametrize(
    "choose",
    [
        pytest.param(first, marks=pytest.mark.timeout(900)),
        pytest.param(more, marks=[pytest.mark.long, pytest.mark.timeout(900)]),
        pytest.param(step_by_step, marks=[pytest.mark.long, pytest.mark.timeout(7200)]),
    ],
)
def test_examples_and_templates_give_comfyuis_latents_by_loops_as_counted(monkeypatch, choose):
    host = find_host()
    # The server takes this process' Python and its paths.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [host.python_path, os.environ.get("PYTHONPATH")])))
    templates = read_examples()
    if choose is not first and installed_version():
        templates += read_templates()
    chosen = choose(executable(judge_all(templates)))
    must = {first: NAMES, more: MORE & EXAMPLES.keys()}.get(choose, set())
    assert {each.name for each in chosen} >= must
    done = execute_all(chosen, templates, host.path)
    assert {each.name: each.error for each in done if not each.same} == {}
    counted = {each.name: reasons(each.steps) for each in chosen}
    assert {each.name: reasons(each.steps) for each in done} == counted
