"""Our texts in the canvas' language: by the sentence that they were made of, with its values. No ComfyUI needed."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from parallel_runtime.said import Said, as_said, fill

TABLES = Path(__file__).parent.parent / "web" / "said"  # English sentence -> sentence; web/js/said.js reads them too
_STOPS = ("。", "：")


@functools.cache
def read_table(language: str) -> dict[str, str]:
    """English sentence -> sentence; empty where the language has no table."""
    file = TABLES / f"{language}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def in_language(text: str, language: str) -> str:
    """The text in that language; a sentence that its table does not have is English, around values that it has."""
    return _speak(as_said(text), read_table(language)) if language != "en" else str(text)


def _speak(text: str, table: dict[str, str]) -> str:
    if not isinstance(text, Said):
        return text
    template = table.get(text.template, text.template)
    if isinstance(text.values, dict):
        said = {name: _speak(value, table) for name, value in text.values.items()}
        return fill(template, said.get)
    spoken = ""
    for part in (_speak(value, table) for value in text.values):
        # Sentences have no space between them behind a full stop that brings its own.
        spoken += part if not spoken or (template == " " and spoken.endswith(_STOPS)) else template + part
    return spoken
