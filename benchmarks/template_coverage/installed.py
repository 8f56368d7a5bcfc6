"""The templates of the installed package comfyui-workflow-templates, and its index."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata, resources
from typing import Any

PACKAGE = "comfyui-workflow-templates"
_FILES = "comfyui_workflow_templates_json"


@dataclass(frozen=True)
class Template:
    """An official template.

    Args:
        usage: how often it was opened, as the package's index says.
    """

    name: str
    usage: int
    workflow: Any


def installed_version() -> str | None:
    """Version of the installed package; None where it, or the part with the workflows, is not there."""
    try:
        metadata.version("comfyui-workflow-templates-json")
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return None


def read_templates() -> Iterator[Template]:
    """All templates that the index lists, most used first.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    folder = resources.files(_FILES) / "templates"
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    # A template may stand in several categories.
    usage = {each["name"]: each.get("usage") or 0 for category in index for each in category["templates"]}
    for name in sorted(usage, key=lambda each: (-usage[each], each)):
        yield Template(name, usage[name], json.loads((folder / f"{name}.json").read_text(encoding="utf-8")))
