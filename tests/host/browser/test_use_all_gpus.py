"""One click puts our loaders in the place of ComfyUI's, in a real browser: ten templates, a menu, a refusal, undo."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from benchmarks.template_coverage.installed import installed_version, read_templates
from benchmarks.template_coverage.totals import judge_all
from tests.template_graphs import Graph, load, sample, save

from .conversion import convert_and_compare, press, touch_files
from .test_panel import wait_for

pytestmark = [pytest.mark.host, pytest.mark.slow]

NAMES = (
    "image_z_image_turbo", "image_krea2_turbo_t2i", "video_wan2_2_14B_i2v", "sdxl_simple_example",
    "flux_kontext_dev_basic", "video_minimax_h3_i2v", "video_ltx2_5_i2v", "image_qwen_image_edit_2509",
    "image_to_video", "audio_stable_audio_example",
)  # fmt: skip
"""In subgraphs, promoted, two experts, a checkpoint, its CLIP vision, linked names of files."""


@pytest.mark.skipif(installed_version() is None, reason="comfyui-workflow-templates is not installed")
def test_ten_templates_convert_undo_and_go_back(canvas, host):
    templates = {each.name: each for each in read_templates() if each.name in NAMES}
    judged = judge_all(list(templates.values()))
    assert len(judged) > 7
    made = [path for each in templates.values() for path in touch_files(each, host.base / "models")]
    try:
        canvas.run("() => app.refreshComboInNodes()")
        infos = host.get("/object_info")
        wrong = {
            each.name: convert_and_compare(canvas, templates[each.name], each, infos, undo=index < 4)
            for index, each in enumerate(judged)
        }
    finally:
        for path in made:
            path.unlink()
    assert {name: found for name, found in wrong.items() if found} == {}


def refused_workflow() -> dict[str, Any]:
    """One loader whose MODEL goes through SelfAttentionGuidance, and one whose MODEL does not."""
    graph = Graph()
    for patched in (True, False):
        model = load(graph, f"{'patched' if patched else 'plain'}.safetensors")
        if patched:
            model = graph.add("SelfAttentionGuidance", "MODEL", widgets=[0.5, 2.0], model=("MODEL", model))
            graph.nodes[-1]["title"] = "My guidance"
        save(graph, sample(graph, model))
    for number, node in enumerate(graph.nodes):
        node |= {"pos": [300 * (number % 4), 300 * (number // 4)], "size": [270, 120], "flags": {}, "order": number}
    return {**graph.workflow(), "version": 0.4, "last_node_id": 20, "last_link_id": 20, "config": {}, "extra": {}}


def loaders(canvas) -> list[str]:
    return [node["type"] for node in canvas.saved()["nodes"] if "Load" in node["type"]]


def test_it_says_beforehand_what_it_cannot_take_along(canvas):
    canvas.load(refused_workflow())
    canvas.command("ParallelDiT.UseAllGpus")
    dialog = canvas.page.get_by_role("dialog").filter(has_text="My guidance")
    dialog.wait_for()
    text = dialog.inner_text()
    assert "patched.safetensors" in text
    assert "it reads attention maps in there" in text
    assert "plain.safetensors" not in text
    canvas.page.keyboard.press("Escape")
    dialog.wait_for(state="hidden")
    assert loaders(canvas) == ["UNETLoader", "UNETLoader"], "who does not agree keeps what is there"
    press(canvas)
    assert loaders(canvas) == ["UNETLoader", "ParallelLoader"]


def test_a_loaders_menu_has_it(canvas):
    canvas.load(refused_workflow())
    steps = canvas.steps()
    point = canvas.run(
        """() => {
          const node = app.rootGraph.nodes.find((each) => each.widgets?.[0]?.value === "plain.safetensors");
          app.canvas.centerOnNode(node);
          app.canvas.draw(true, true);
          const place = app.canvas.convertOffsetToCanvas([node.pos[0] + 60, node.pos[1] - 12]);
          const box = app.canvas.canvas.getBoundingClientRect();
          return [place[0] + box.left, place[1] + box.top];
        }"""
    )
    canvas.page.mouse.click(*point, button="right")
    older = canvas.page.locator(".litemenu-entry", has_text="Use all GPUs")
    canvas.page.get_by_role("menuitem", name="Use all GPUs").or_(older).click()
    canvas.page.wait_for_function("() => app.rootGraph.nodes.some((node) => node.type === 'ParallelLoader')")
    assert loaders(canvas) == ["UNETLoader", "ParallelLoader"]
    wait_for(lambda: canvas.steps() > steps)  # the canvas notes a change a moment after it
    for _ in range(5):  # a key pressed while the menu still closes is the menu's
        canvas.page.keyboard.press("Control+z")
        with suppress(TimeoutError):
            wait_for(lambda: "ParallelLoader" not in loaders(canvas), 10)
            break
    assert loaders(canvas) == ["UNETLoader", "UNETLoader"]


_VAE_MENU = """async (title) => {
  const node = app.rootGraph.nodes.find((each) => ["VAELoader", "ParallelVAE"].includes(each.type) && (
    title.includes("all") ? each.type === "VAELoader" : each.type === "ParallelVAE"));
  const items = app.extensions.flatMap((each) => each.getNodeMenuItems?.(node) ?? []);
  await items.find((each) => each?.content === title).callback();
  return app.rootGraph.nodes.map((each) => each.type).sort();
}"""


def giver_of_the_decode(canvas) -> str:
    """The type of the node whose VAE is decoded with."""
    return canvas.run(
        """() => {
          const decode = app.rootGraph.nodes.find((each) => each.type === "VAEDecode");
          return decode.getInputNode(decode.findInputSlot("vae")).type;
        }"""
    )


def test_a_vae_loaders_menu_puts_parallel_vae_behind_it_and_takes_it_away(canvas):
    canvas.run(
        """() => {
          app.graph.clear();
          const [loader, decode] = ["VAELoader", "VAEDecode"].map((type) => LiteGraph.createNode(type));
          for (const node of [loader, decode]) app.graph.add(node);
          loader.connect(0, decode, decode.findInputSlot("vae"));
        }"""
    )
    assert canvas.run(_VAE_MENU, "Encode and decode on all GPUs") == ["ParallelVAE", "VAEDecode", "VAELoader"]
    assert giver_of_the_decode(canvas) == "ParallelVAE"
    assert canvas.run(_VAE_MENU, "Encode and decode on one GPU") == ["VAEDecode", "VAELoader"]
    assert giver_of_the_decode(canvas) == "VAELoader"


def two_pipelines(subgraph: bool) -> str:
    """Two Parallel Loaders, each with its Parallel Config, sampler and Load VAE; the first in a subgraph, if wished."""
    return f"""() => {{
      app.graph.clear();
      const made = ["cpu:1", "cpu:2"].map((devices) => {{
        const types = ["ParallelConfig", "ParallelLoader", "KSampler", "VAELoader", "VAEDecode", "SaveImage"];
        const nodes = types.map((type) => LiteGraph.createNode(type));
        for (const node of nodes) app.graph.add(node);
        const [config, loader, sampler, vae, decode, save] = nodes;
        config.widgets.find((each) => each.name === "devices").value = devices;
        vae.widgets[0].value = "vae.safetensors";
        const lead = (from, to, name) => from.connect(0, to, to.findInputSlot(name));
        lead(config, loader, "parallel_config");
        lead(loader, sampler, "model");
        lead(sampler, decode, "samples");
        lead(vae, decode, "vae");
        lead(decode, save, "images");
        return nodes;
      }});
      if ({str(subgraph).lower()}) app.graph.convertToSubgraph(new Set(made[0].slice(0, 5)));
    }}"""


@pytest.mark.parametrize("subgraph", [False, True])
def test_a_vae_gets_the_configuration_of_the_loader_that_it_works_with(canvas, subgraph):
    canvas.run(two_pipelines(subgraph))
    canvas.load(canvas.saved())
    canvas.run(_CONVERT, True)
    prompt = canvas.prompt()
    devices = {}
    for node in prompt.values():
        if node["class_type"] == "VAEDecode":
            model = prompt[prompt[node["inputs"]["samples"][0]]["inputs"]["model"][0]]
            vae = prompt[node["inputs"]["vae"][0]]
            assert (model["class_type"], vae["class_type"]) == ("ParallelLoader", "ParallelVAE")
            given, taken = (each["inputs"]["parallel_config"] for each in (model, vae))
            assert given == taken
            devices[prompt[taken[0]]["inputs"]["devices"]] = True
    assert sorted(devices) == ["cpu:1", "cpu:2"], "each has its own"
    canvas.run(_CONVERT, False)
    links = [link for node in canvas.saved()["nodes"] for output in node["outputs"] for link in output["links"] or []]
    assert len(links) == len(set(links)) == len(canvas.saved()["links"])


def with_vaes(subgraph: bool) -> str:
    """Makes a checkpoint whose VAE is decoded with twice, and a Load VAE without a file; in a subgraph, if wished."""
    return f"""() => {{
      app.graph.clear();
      const types = ["CheckpointLoaderSimple", "VAEDecode", "VAEDecode", "VAELoader", "VAEDecode"];
      const nodes = types.map((type) => LiteGraph.createNode(type));
      for (const node of nodes) app.graph.add(node);
      const [loader, first, second, without, third] = nodes;
      for (const decode of [first, second]) loader.connect(2, decode, decode.findInputSlot("vae"));
      without.widgets[0].value = "pixel_space";
      without.connect(0, third, third.findInputSlot("vae"));
      const inside = new Set([loader, first]);
      if ({str(subgraph).lower()}) app.graph.convertToSubgraph(inside);
    }}"""


_CONVERT = """async (wish) => {
  const { convert } = await import("/extensions/parallel-dit/js/use_all_gpus.js");
  const confirm = app.extensionManager.dialog.confirm;
  app.extensionManager.dialog.confirm = async () => true;
  try { await convert(wish, null, wish); } finally { app.extensionManager.dialog.confirm = confirm; }
}"""

_VAES = """() => {
  const graphs = [app.rootGraph, ...app.rootGraph.subgraphs.values()];
  const origin = (graph, node) => {
    const link = graph.getLink(node.inputs[node.findInputSlot("vae")].link);
    const giver = graph.getNodeById(link.origin_id);
    return giver.isSubgraphNode?.() ? "subgraph" : giver.type;
  };
  const named = (graph) => graph.nodes.filter((node) => ["VAEDecode", "ParallelVAE"].includes(node.type))
    .map((node) => `${node.type} of ${origin(graph, node)}`);
  return graphs.flatMap(named).sort();
}"""


@pytest.mark.parametrize("subgraph", [False, True])
def test_vaes_go_to_all_gpus_as_well_once_and_come_back(canvas, subgraph):
    canvas.run(with_vaes(subgraph))
    canvas.load(canvas.saved())
    before = canvas.run(_VAES)
    canvas.run(_CONVERT, True)
    after = canvas.run(_VAES)
    second = "subgraph" if subgraph else "ParallelVAE"
    decodes = [f"VAEDecode of {giver}" for giver in ("ParallelVAE", second, "VAELoader")]
    assert after == sorted(["ParallelVAE of CheckpointLoaderSimple", *decodes])
    canvas.run(_CONVERT, True)
    assert canvas.run(_VAES) == after
    canvas.run(_CONVERT, False)
    assert canvas.run(_VAES) == before
    steps = canvas.steps()
    canvas.run(_CONVERT, True)
    for _ in range(canvas.steps() - steps):  # more than one where nodes of a new graph still settle
        canvas.undo()
    assert canvas.run(_VAES) == before
