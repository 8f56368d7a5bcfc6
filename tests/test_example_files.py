"""The files that example workflows offer are those of ComfyUI's own templates: same name, address and folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.template_coverage.installed import installed_version, read_templates

EXAMPLES = sorted((Path(__file__).parent.parent / "example_workflows").glob("*.json"))
IN_NO_TEMPLATE = {"Hyper-FLUX.1-dev-8steps-lora.safetensors", "wan2.1_t2v_14B_bf16.safetensors"}
"""Looked up elsewhere: in the text of other packs and projects."""


@pytest.mark.host
@pytest.mark.skipif(installed_version() is None, reason="comfyui-workflow-templates is not installed")
def test_files_of_the_examples_are_those_of_the_official_templates():
    official = {offered for template in read_templates() for offered in files(template.workflow)}
    ours = {path.name: set(files(json.loads(path.read_text(encoding="utf-8")))) for path in EXAMPLES}
    assert all(ours.values())
    unknown = {(name, *each) for name, offered in ours.items() for each in offered - official}
    assert {each[1] for each in unknown} == IN_NO_TEMPLATE, unknown


def files(value: Any) -> Iterator[tuple[str, str, str]]:
    """(name, address, folder) of all that nodes of a workflow and of its subgraphs offer."""
    if isinstance(value, dict):
        for each in value.get("models") or []:
            if isinstance(each, dict) and "url" in each:
                yield each["name"], each["url"].partition("?")[0], each.get("directory", "")
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from files(each)
