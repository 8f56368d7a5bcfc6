"""Our examples, and official templates, from loader to sampler in a real ComfyUI, made small: the same latents as with
Load Diffusion Model.

docs/models.md has the table of a larger sample (python -m benchmarks.template_coverage --execute).
"""

from __future__ import annotations

import json
import os

import pytest

from benchmarks.template_coverage.execution import executable, execute_all
from benchmarks.template_coverage.installed import Template, installed_version, read_templates
from benchmarks.template_coverage.totals import judge_all

from .browser.examples import EXAMPLES
from .find_host import PACK_ROOT, find_host

pytestmark = [pytest.mark.host, pytest.mark.slow]

NAMES = ["video_ltx2_5_i2v"]
"""Two stages of video with sound. The examples have the rest."""


def read_examples() -> list[Template]:
    folder = PACK_ROOT / "example_workflows"
    return [Template(name, 0, json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))) for name in EXAMPLES]


@pytest.mark.timeout(900)
def test_examples_and_templates_give_comfyuis_latents(monkeypatch):
    host = find_host()
    # The server takes this process' Python and its paths.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [host.python_path, os.environ.get("PYTHONPATH")])))
    official = [each for each in read_templates() if each.name in NAMES] if installed_version() else []
    templates = [*read_examples(), *official]
    chosen = executable(judge_all(templates))
    assert {each.name for each in chosen} >= EXAMPLES.keys()
    done = execute_all(chosen, templates, host.path)
    assert {each.name: each.error for each in done if not each.same} == {}
