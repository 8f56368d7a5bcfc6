"""Nodes 2.0, where nodes are elements of the page and not drawn on the canvas: what ran is read there, too."""

from __future__ import annotations

import pytest

from tests.host.workflow import Workflow

from .test_panel import open_prompt, queue, set_setting, wait_for

pytestmark = [pytest.mark.host, pytest.mark.slow]

_SPY = """() => { window.drawn = new Set();
  const fillText = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, ...others) {
    window.drawn.add(String(text));
    return fillText.call(this, text, ...others);
  }; }"""


@pytest.fixture
def nodes_2(canvas):
    set_setting(canvas, "Comfy.VueNodes.Enabled", True)
    set_setting(canvas, "Comfy.Locale", "zh")
    yield canvas.elsewhere()  # as a page that is open makes its graph anew for another language, some time later
    set_setting(canvas, "Comfy.VueNodes.Enabled", False)
    set_setting(canvas, "Comfy.Locale", "en")


def test_what_ran_stands_on_nodes_and_below_a_subgraph_in_the_canvas_language(host, nodes_2, tmp_path):
    canvas = nodes_2
    prompt = Workflow(loader="cpu:2", model="plan.safetensors", seed=601, steps=3).prompt()
    prompt["config"]["inputs"]["warmup_steps"] = 3  # as in no other test: a cached node says what it said, in English
    open_prompt(canvas, prompt)
    canvas.run(_SPY)
    queue(canvas, host)
    canvas.page.get_by_text("的图片：").first.wait_for()  # on Parallel Loader
    canvas.page.get_by_text("切分方式按模型和图片选择").first.wait_for()  # on Parallel Config
    drawn = "(start) => [...window.drawn].some((text) => text.startsWith(start))"
    wait_for(lambda: canvas.run(drawn, "每步"))  # above KSampler
    canvas.run(
        """() => { const graph = app.rootGraph;
          const inside = graph.nodes.filter((node) => ["ParallelConfig", "ParallelLoader"].includes(node.comfyClass));
          graph.convertToSubgraph(new Set(inside)); }"""
    )
    canvas.run(
        """() => { const { subgraph } = app.rootGraph.nodes.find((node) => node.subgraph);
          const loader = subgraph.nodes.find((node) => node.comfyClass === "ParallelLoader");
          loader.widgets.find(({ name }) => name === "weight_dtype").value = "fp32"; }"""
    )
    queue(canvas, host)
    wait_for(lambda: canvas.run(drawn, "一张 "))
    canvas.picture(tmp_path / "nodes_2.png")
