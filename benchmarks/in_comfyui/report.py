"""Results as JSON and as Markdown tables."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workers.driver import list_gpus

from .journey_verdict import NATIVE
from .journey_verdict import table as journey_table
from .whole_prompts import PARTS

Result = Mapping[str, Any]
_DASH = "–"


def describe_machine(log: str, infos: Mapping[str, Any]) -> dict[str, Any]:
    """What the numbers hold for.

    Args:
        log: ComfyUI's console, which says what it found.
        infos: answer of /system_stats.
    """
    system = infos["system"]
    kernels = re.findall(r"comfy_kitchen backend (\w+): (.*)", log)
    return {
        "GPUs": [f"{gpu.name}, {gpu.memory_total >> 20} MiB, {gpu.driver}" for gpu in list_gpus()],
        "ComfyUI": system["comfyui_version"],
        "Python": system["python_version"].split()[0],
        "torch": system["pytorch_version"],
        "comfy-kitchen": {name: _availability(text) for name, text in kernels},
    }


def _availability(text: str) -> str:
    found = re.search(r"'available': (\w+), 'disabled': (\w+)", text)
    return text[:80] if found is None else {"True": "available", "False": "missing"}[found[1]]


def write(path: Path, machine: Mapping[str, Any], results: Sequence[Result]) -> None:
    """Write everything, as it is so far."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps({"machine": machine, "results": results}, indent=1, ensure_ascii=False))
    unfinished.replace(path)


def tables(machine: Mapping[str, Any], results: Sequence[Result]) -> str:
    """All tables as Markdown."""
    parts = [", ".join(f"{key}: {_plain(value)}" for key, value in machine.items())]
    parts += [_speeds([result for result in results if result.get("kind") == "speed"])]
    parts += [_controls([result for result in results if result.get("kind") == "controlnet"])]
    parts += [_memories([result for result in results if result.get("kind") == "memory"])]
    parts += [_starts([result for result in results if result.get("kind") == "start"])]
    parts += [_faults([result for result in results if result.get("kind") == "fault"])]
    parts += [_table("A journey with the defaults", *journey_table(results))]
    parts += [_distances([result for result in results if result.get("kind") == "distance"])]
    parts += [_vaes([result for result in results if result.get("kind") == "vae"])]
    parts += [_prompts([result for result in results if result.get("kind") == "prompts"])]
    parts += [_loops([result for result in results if result.get("kind") == "loops"])]
    parts += [_failures(results)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _speeds(results: Sequence[Result]) -> str:
    rows = [
        [
            result["model"],
            result["way"],
            result["gpus"],
            result.get("ms"),
            result.get("ms previews"),
            result.get("first prompt s"),
            result.get("later prompt s"),
            result.get("later image s"),
            _distance(result.get("distance")),
        ]
        for result in results
    ]
    title = (
        "ms per step (median), whole prompts to a saved latent or image in s, distance of the latent from ComfyUI's own"
    )
    heads = [
        "model",
        "way",
        "GPUs",
        "ms per step",
        "with previews",
        "first prompt",
        "later prompt",
        "to image",
        "distance",
    ]
    return _table(title, heads, rows)


def _controls(results: Sequence[Result]) -> str:
    keys = ("model", "way", "gpus", "ms", "ms mean", "ms without", "first prompt s", "later prompt s")
    rows = [[*map(result.get, keys), _distance(result.get("distance"))] for result in results]
    heads = ["model", "way", "GPUs", "ms per step", "in the mean", "without it", "first prompt", "later prompt"]
    title = "With a ControlNet: ms per step (median), whole prompts to a saved latent in s, distance of the latent"
    return _table(title, [*heads, "distance"], rows)


def _memories(results: Sequence[Result]) -> str:
    rows = [
        [
            result["model"],
            result["way"],
            result["gpus"],
            *(_held(result.get(key)) for key in ("before GiB", "peak GiB", "after prompt GiB", "3 s after unload GiB")),
            result.get("ranks below 1.5 GiB after s"),
            result.get("first step after unload s"),
        ]
        for result in results
    ]
    title = "GiB per process; seconds"
    heads = ["model", "way", "GPUs", "before", "peak", "after the prompt", "3 s after Unload"]
    return _table(title, [*heads, "ranks below 1.5 GiB after", "next first step after"], rows)


def _starts(results: Sequence[Result]) -> str:
    rows = []
    for result in results:
        for row in result.get("rows", []):
            step = row.get("from one to the other s", row.get("beyond a step ms"))
            steps = row.get("steps ms")
            rows.append(
                [
                    result["model"],
                    result["way"],
                    result["gpus"],
                    row["what"],
                    row["first step s"],
                    row["prompt s"],
                    step,
                    steps and " ".join(f"{time:.0f}" for time in steps),
                    _distance(row.get("distance")),
                ]
            )
    heads = ["model", "way", "GPUs", "what", "first step after", "whole prompt"]
    title = "Seconds from the queue; a switch between experts in s, a LoRA in ms beyond a step"
    return _table(title, [*heads, "switch", "steps, ms", "distance"], rows)


def _faults(results: Sequence[Result]) -> str:
    rows = [
        [
            result["fault"],
            result["way"],
            result.get("ended after s"),
            result.get("first step of the next s"),
            result.get("said"),
        ]
        for result in results
    ]
    return _table("Faults: seconds", ["fault", "way", "ended after", "next first step after", "said"], rows)


def _loops(results: Sequence[Result]) -> str:
    keys = ("node", "ms", "first step s", "all s", "error")
    rows = [[result["model"], *map(row.get, keys)] for result in results for row in result.get("rows", ())]
    title = "Loops of each sampler node: ms a step, seconds to the first step and in all, of a third prompt"
    return _table(title, ["model", *keys], rows)


def _vaes(results: Sequence[Result]) -> str:
    keys = ("model", "way", "gpus", "first s", "later ms", "network ms")
    rows = [[*map(result.get, keys), _distance(result.get("distance"))] for result in results]
    title = "VAE Decode: seconds of the first, median of the last, and of it in the network, distance from Load VAE's"
    return _table(title, [*keys, "distance"], rows)


def _prompts(results: Sequence[Result]) -> str:
    native = {
        (result["file"], row["what"]): row["all s"]
        for result in results
        if result["gpus"] == 1 and result["way"] == NATIVE
        for row in result.get("rows", ())
    }
    rows = []
    for result in results:
        for row in result.get("rows", ()):
            theirs = native.get((result["file"], row["what"]))
            times = None if theirs is None else f"{theirs / row['all s']:.2f}"
            seconds = [row[part] for part in PARTS if part in row]
            rest = round(row["all s"] - sum(seconds), 3) if seconds else None
            seconds = seconds or [None] * len(PARTS)
            told = [result["model"], result["way"], result["gpus"], row["what"]]
            rows.append([*told, *seconds, rest, row["all s"], times])
    title = (
        "Whole prompts, seconds from the queue to the saved file; load has what comes before the first step; "
        "times: of Load Diffusion Model's"
    )
    return _table(title, ["model", "way", "GPUs", "prompt", *PARTS, "rest", "all", "times"], rows)


def _distances(results: Sequence[Result]) -> str:
    rows = [
        [
            result["model"],
            row["what"],
            _distance(row.get("distance")),
            row.get("error") or ("same bits" if row["bits"] else ""),
        ]
        for result in results
        for row in result.get("rows", [])
        if row.get("error") or "bits" in row
    ]
    title = "Distance of the latent from that of Load Diffusion Model, relative to its norm"
    return _table(title, ["model", "way", "distance", ""], rows)


def _failures(results: Sequence[Result]) -> str:
    rows = [[result["name"], result["error"]] for result in results if result.get("error")]
    return _table("Failed", ["measurement", "why"], rows)


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    if not rows:
        return ""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join([f"{title}:", "", *("| " + " | ".join(map(_plain, line)) + " |" for line in lines)])


def _held(held: Mapping[str, float] | None) -> str:
    if held is None:
        return _DASH
    return ", ".join(f"{name} {size:.1f}" for name, size in held.items()) or "nothing"


def _distance(value: float | None) -> str:
    return _DASH if value is None else f"{value:.1e}"


def _plain(value: Any) -> str:
    if value is None:
        return _DASH
    if isinstance(value, Mapping):
        return " ".join(f"{key} {_plain(inner)}" for key, inner in value.items()) or _DASH
    if isinstance(value, list):
        return "; ".join(map(_plain, value)) or _DASH
    return str(value).replace("|", "/").replace("\n", " ")
