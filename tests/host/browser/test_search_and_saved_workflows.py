"""The loaders are found by the words of artists; workflows of every commit of this repository still load."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tests.host.find_host import PACK_ROOT

from .conversion import invalid

pytestmark = [pytest.mark.host, pytest.mark.slow]

WORDS = ["load diffusion", "flux", "qwen", "wan", "multi gpu", "distributed", "parallel", "unet"]
_INPUTS_OF_LOADERS = """() => app.rootGraph.nodes.filter((node) => /^Parallel.*Loader$/.test(node.comfyClass)).flatMap(
  (node) => node.inputs.map((input) => input.name))"""


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=PACK_ROOT, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def saved_workflows() -> dict[str, Any]:
    """Every version of every workflow in the repository's history, each content once."""
    found = {}
    for commit in git("log", "--format=%H", "--", "example_workflows").split():
        for line in git("ls-tree", "-r", commit, "--", "example_workflows").splitlines():
            (_, _, blob), name = line.split("\t")[0].split(), line.split("\t")[1]
            if name.endswith(".json") and blob not in found:
                found[blob] = (name, json.loads(git("cat-file", "-p", blob)))
    return {f"{name} {blob[:8]}": content for blob, (name, content) in found.items()}


def test_the_loaders_are_found_by_the_words_of_artists(canvas):
    canvas.run("() => app.rootGraph.clear()")
    found = {}
    for word in WORDS:
        canvas.page.mouse.move(600, 500)
        canvas.command("Workspace.SearchBox.Toggle")
        field = canvas.page.locator("input[role=combobox]")
        field.wait_for()
        field.fill(word)
        options = canvas.page.get_by_role("option")
        options.filter(has_text="Parallel Loader").first.wait_for()
        found[word] = options.all_inner_texts()
        canvas.page.keyboard.press("Escape")
        field.wait_for(state="hidden")
    assert {
        word for word, texts in found.items() if not any("Parallel Checkpoint Loader" in each for each in texts)
    } == set()


def test_workflows_of_the_whole_history_load(canvas, host):
    workflows = saved_workflows()
    if len(workflows) < 5:
        pytest.skip("no history here: a shallow clone")
    infos = host.get("/object_info")
    wrong = {}
    for name, workflow in workflows.items():
        canvas.load(workflow)
        prompt = canvas.prompt()
        ours = [key for key, node in prompt.items() if str(node["class_type"]).startswith("Parallel")]
        assert ours, name
        found = [
            each
            for key in ours
            for each in invalid(prompt, key, infos)
            if not each.startswith(("model_name: ", "ckpt_name: "))
        ]
        saved = {str(node["id"]): node for node in workflow["nodes"]}
        for key in ours:
            node = saved[key]
            values = dict(zip(node.get("widgets_values_named", ()), node["widgets_values"], strict=False))
            if "compile" in values:
                values["compile"] = {True: "on", False: "off"}.get(values["compile"], values["compile"])
            got = prompt[key]["inputs"]
            found += [
                f"{each}: {value} became {got[each]}" for each, value in values.items() if got.get(each, value) != value
            ]
        if "network" in canvas.run(_INPUTS_OF_LOADERS):  # of graphs from before
            found.append("the loader has an input that nothing reads")
        if found:
            wrong[name] = found
    assert wrong == {}
