"""Presses "Use all GPUs" on a template, and holds what the server would get against the template's judgement."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.template_coverage.installed import Template
from benchmarks.template_coverage.judgement import Run
from benchmarks.template_coverage.node_types import LOADERS
from benchmarks.template_coverage.prompt_graph import read_prompt
from benchmarks.template_coverage.totals import Judged

from .canvas import Canvas

OURS = {"ParallelLoader": "model_name", "ParallelCheckpointLoader": "ckpt_name"}
FOLDERS = {"UNETLoader": "diffusion_models", "UnetLoaderGGUF": "diffusion_models"}

_VIEW = "viewport_state"
"""A widget that a 3D view sets by itself, some time after a workflow is loaded."""

_PRESS = """async (toOurs) => {
  const { judgeLoaders, convert } = await import("/extensions/parallel-dit/js/use_all_gpus.js");
  const { stays } = await judgeLoaders(toOurs);
  const confirm = app.extensionManager.dialog.confirm;
  app.extensionManager.dialog.confirm = async () => true;
  try { await convert(toOurs); } finally { app.extensionManager.dialog.confirm = confirm; }
  return stays;
}"""


def press(canvas: Canvas, to_ours: bool = True) -> list[str]:
    """Press the command and agree to what it asks; returns what it says of loaders that stay."""
    return canvas.run(_PRESS, to_ours)


def touch_files(template: Template, models: Path) -> list[Path]:
    """Empty files by the names that a template's loaders load, so that lists have them; returns those made."""
    made = []
    for node in read_prompt(template.workflow).values():
        loader = LOADERS.get(node.kind)
        name = str(node.widgets.get(loader.file, "")) if loader else ""
        path = models / FOLDERS.get(node.kind, "checkpoints") / name.replace("\\", "/")
        if name and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            made.append(path)
    return made


def convert_and_compare(
    canvas: Canvas, template: Template, judged: Judged, infos: Mapping[str, Any], undo: bool = False
) -> list[str]:
    """Convert a template and back again; returns what is wrong.

    Args:
        infos: the server's /object_info.
        undo: undo and go back as well, and hold each against what was before.
    """
    canvas.load(template.workflow)
    before, saved, steps = canvas.prompt(), canvas.saved(), canvas.steps()
    stays = press(canvas)
    after = canvas.prompt()
    sampled = {":".join(map(str, path)) for path in Run(read_prompt(template.workflow)).sampled_loaders()}
    wrong = [] if before.keys() == after.keys() else [f"other nodes: {before.keys() ^ after.keys()}"]
    if judged.judgement.converts:
        wrong += [f"{name} stays: {stays}" for name in sampled if after[name]["class_type"] not in OURS]
    elif any(after[name]["class_type"] in OURS for name in sampled):
        wrong.append("a loader moved that cannot")
    elif not stays:
        wrong.append("it says nothing of a loader that stays")
    for name in before.keys() & after.keys():
        wrong += [f"{name} ({before[name]['class_type']}): {each}" for each in _changes(before, after, name)]
        if after[name]["class_type"] in OURS:
            # What the frontend makes of a template may be invalid before: 1.58 mixes up promoted values of a few.
            own = invalid(before, name, infos)
            wrong += [f"{name}: {each}" for each in invalid(after, name, infos) if each not in own]
            if _types(before, name, infos) != _types(after, name, infos):
                wrong.append(f"{name} gives its takers other types")
    if undo:
        if canvas.steps() != steps + 1:
            wrong.append(f"{canvas.steps() - steps} steps to undo")
        canvas.undo()
        if _unordered(canvas.saved()) != _unordered(saved):
            wrong.append("undone, it is another workflow")
        press(canvas)
        press(canvas, to_ours=False)
        if _untitled(canvas.prompt()) != _untitled(before):
            wrong.append("on one GPU again, it is another prompt")
    return wrong


def _changes(before: Mapping[str, Any], after: Mapping[str, Any], name: str) -> list[str]:
    """What differs at a node, beside what a loader of ours that takes a place makes different."""
    old, new = before[name], after[name]
    if new["class_type"] not in OURS:
        wanted = {key: _moved(value, before, after) for key, value in old["inputs"].items()}
        given = {**new, "_meta": 0}
        if _VIEW in wanted:
            given["inputs"] = {**given["inputs"], _VIEW: wanted[_VIEW]}
        return [] if given == {**old, "inputs": wanted, "_meta": 0} else [f"{old} became {new}"]
    file = LOADERS[old["class_type"]].file
    wanted = {"weight_dtype": "default", **old["inputs"]}
    wanted[OURS[new["class_type"]]] = wanted.pop(file)
    return [] if new["inputs"] == wanted else [f"{old['inputs']} became {new['inputs']}"]


def _unordered(value: Any) -> Any:
    """A workflow without the order of its links, in which a frontend writes them as it finds them."""
    if isinstance(value, list):
        return [_unordered(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    own = {key: _unordered(each) for key, each in value.items()}
    return own | ({"links": sorted(own["links"], key=str)} if own.get("links") else {})


def _untitled(prompt: Mapping[str, Any]) -> dict[str, Any]:
    """A prompt without what the server does not read: titles, and where a node's pack came from (frontend 1.58)."""
    return {name: {**node, "_meta": 0} for name, node in prompt.items()}


def _types(prompt: Mapping[str, Any], name: str, infos: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """Types of what a node gives: (taker, input) -> type."""
    given = infos[prompt[name]["class_type"]]["output"]
    return {
        (other, key): given[value[1]]
        for other, node in prompt.items()
        for key, value in node["inputs"].items()
        if isinstance(value, list) and len(value) == 2 and value[0] == name
    }


def _moved(value: Any, before: Mapping[str, Any], after: Mapping[str, Any]) -> Any:
    """A link as it has to be: slots of Load Checkpoint Image Only's outputs are others on ours."""
    if not (isinstance(value, list) and len(value) == 2 and value[0] in before):
        return value
    moved = before[value[0]]["class_type"] == "ImageOnlyCheckpointLoader" and after[value[0]]["class_type"] in OURS
    return [value[0], {1: 3}.get(value[1], value[1])] if moved else value


def invalid(prompt: Mapping[str, Any], name: str, infos: Mapping[str, Any]) -> list[str]:
    """What the server's validation would say of a node."""
    node = prompt[name]
    inputs = infos[node["class_type"]]["input"]
    wrong = [f"{key} is missing" for key in inputs.get("required", {}) if key not in node["inputs"]]
    for key, value in node["inputs"].items():
        spec = {**inputs.get("required", {}), **inputs.get("optional", {})}[key]
        if isinstance(value, list):
            given = infos[prompt[value[0]]["class_type"]]["output"][value[1]]
            wrong += [] if given in (spec[0], "*", "COMBO") else [f"{key} gets {given}"]
        else:
            choices = spec[0] if isinstance(spec[0], list) else spec[1].get("options", [value])
            wrong += [] if value in choices else [f"{key}: {value} is none of {len(choices)} choices"]
    return wrong
