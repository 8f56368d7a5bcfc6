"""Official templates from loader to sampler in a real ComfyUI, made small: the latents that Load Diffusion Model gives.

docs/models.md has the table of a larger sample (python -m benchmarks.template_coverage --execute).
"""

from __future__ import annotations

import os

import pytest

from benchmarks.template_coverage.execution import executable, execute_all
from benchmarks.template_coverage.installed import installed_version, read_templates
from benchmarks.template_coverage.totals import judge_all

from .find_host import find_host

pytestmark = [
    pytest.mark.host,
    pytest.mark.slow,
    pytest.mark.skipif(installed_version() is None, reason="comfyui-workflow-templates is not installed"),
]

NAMES = ["video_wan2_2_14B_i2v", "image_krea2_turbo_t2i", "video_ltx2_5_i2v", "flux_kontext_dev_basic"]
"""Two experts; a switch that is open; two stages of video with sound; a reference picture."""


def test_templates_give_comfyuis_latents(monkeypatch):
    host = find_host()
    # The server takes this process' Python and its paths.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [host.python_path, os.environ.get("PYTHONPATH")])))
    templates = list(read_templates())
    chosen = [each for each in executable(judge_all(templates)) if each.name in NAMES]
    if len(chosen) < len(NAMES):
        pytest.skip(f"this package of templates has {[each.name for each in chosen]} alone")
    done = execute_all(chosen, templates, host.path)
    assert {each.name: each.error for each in done if not each.same} == {}
