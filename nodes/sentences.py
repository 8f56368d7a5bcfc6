"""Our sentences in the language of the canvas: found in an English text by the patterns of locales/. No ComfyUI needed.

A pattern is the English sentence of a table of `locales/en/` (plans and refusals, errors, the doctor's report), with
{n} for a number, {s} for a duration and {name} for any other value, and numbers behind names where there are several.
What no pattern knows stays as it is.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

LOCALES = Path(__file__).parent.parent / "locales"
TABLES = ("sentences", "errors", "doctor")
_NUMBER = r"\d+(?:\.\d+)?"
_KINDS = {"n": _NUMBER, "s": rf"{_NUMBER} m?s"}
_ANY = r"(?:(?!\. )[^\n])+?"  # within one sentence; a file's name may hold a full stop
_FIRST = r"(?:(?!\. )[^\n。])+?"  # and not from a sentence before, which may be translated already
_LONGEST = 4000
"""Characters of a text that is looked through, which takes up to a fifth of a second; longer ones are logs."""
_VALUE = re.compile(r"\{([a-z]+)(\d*)\}")
_PLACE = re.compile(r"\{[a-z]+\d*\}")
_WIDE = "\u3001-\u30ff\u4e00-\u9fff\uff00-\uffef"  # Chinese and Japanese
_STOP = re.compile(rf"(?<=[{_WIDE}])([.,;:])(?: |(?=\n)|$)|([.,;:]) (?=[{_WIDE}])|(?<=[。，、；：]) ")
"""Between phrases of which one is translated: they were joined in English."""
_STOPS = {
    "zh": {".": "。", ",": "，", ";": "；", ":": "：", None: ""},
    "ja": {".": "。", ",": "、", ";": "；", ":": "：", None: ""},
}
_END = r"(?=$|[\s.,;:()”\"])"


def read_table(language: str) -> dict[str, str]:
    """Code -> sentence; none where the language has no tables."""
    files = [LOCALES / language / f"{name}.json" for name in TABLES]
    return {
        code: sentence
        for file in files
        if file.is_file()
        for code, sentence in json.loads(file.read_text(encoding="utf-8")).items()
    }


def translated(text: str, language: str) -> str:
    """The text, with each sentence or phrase that the tables know in that language, and all else in English; one
    that is too long as it is."""
    said = _without_punctuation(text, language) if len(text) <= _LONGEST else text
    if said == text:
        return text
    return _STOP.sub(lambda found: _STOPS[language][found[1] or found[2]], said).strip()


def _without_punctuation(text: str, language: str) -> str:
    for parts, pattern, sentence in _patterns(language):
        if all(part in text for part in parts):  # which costs little, and most patterns are of other texts
            text = pattern.sub(functools.partial(_filled, sentence, language), text)
    return text


def _filled(sentence: str, language: str, found: re.Match[str]) -> str:
    values = found.groupdict()
    return _VALUE.sub(lambda name: _without_punctuation(values[name[1] + name[2]], language), sentence)


@functools.cache
def _patterns(language: str) -> list[tuple[list[str], re.Pattern[str], str]]:
    """The parts between a pattern's values, the pattern, and what stands in its place; the longest first, as phrases
    are parts of sentences."""
    english, other = read_table("en"), read_table(language) if language != "en" else {}
    known = sorted((code for code in english if code in other), key=lambda code: -len(_VALUE.sub("", english[code])))
    return [(_PLACE.split(english[code]), _pattern(english[code]), other[code]) for code in known]


def _pattern(sentence: str) -> re.Pattern[str]:
    parts, begin, named = [], 0, set()
    for value in _VALUE.finditer(sentence):
        name = value[1] + value[2]
        kind = _KINDS.get(value[1], _ANY if value.start() else _FIRST)
        parts += [
            re.escape(sentence[begin : value.start()]),
            f"(?P={name})" if name in named else f"(?P<{name}>{kind})",
        ]
        named.add(name)
        begin = value.end()
    return re.compile(rf"(?<![\w.])(?:{''.join(parts)}{re.escape(sentence[begin:])}){_END}")
