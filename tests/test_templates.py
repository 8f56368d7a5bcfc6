"""Templates that the canvas offers have known nodes, sound links, their files' places, and room for each node."""

from __future__ import annotations

import json
import re

import pytest

from tests.test_documents import NODES, ROOT

WORKFLOWS = sorted((ROOT / "example_workflows").glob("*.json"))


CORE_NODES = {
    "BasicGuider",
    "BasicScheduler",
    "CFGGuider",
    "CFGNorm",
    "CLIPLoader",
    "CLIPTextEncode",
    "ConditioningZeroOut",
    "CreateVideo",
    "DualCLIPLoader",
    "EmptyHunyuanLatentVideo",
    "EmptyLTXVLatentVideo",
    "EmptyLatentImage",
    "EmptySD3LatentImage",
    "FluxGuidance",
    "FluxKontextImageScale",
    "KSampler",
    "KSamplerAdvanced",
    "KSamplerSelect",
    "LTXAVTextEncoderLoader",
    "LTXVAudioVAEDecode",
    "LTXVAudioVAELoader",
    "LTXVConcatAVLatent",
    "LTXVConditioning",
    "LTXVEmptyLatentAudio",
    "LTXVScheduler",
    "LTXVSeparateAVLatent",
    "LoadImage",
    "LoraLoaderModelOnly",
    "MarkdownNote",
    "MiniMaxH3ImageToVideo",
    "ModelSamplingAuraFlow",
    "ModelSamplingSD3",
    "RandomNoise",
    "ReferenceLatent",
    "SamplerCustomAdvanced",
    "SaveAnimatedWEBP",
    "SaveImage",
    "SaveVideo",
    "TextEncodeQwenImageEditPlus",
    "VAEDecode",
    "VAEDecodeAudio",
    "VAEEncode",
    "VAELoader",
}
"""Nodes of ComfyUI that a template may use; a new one is added here after it was seen on the canvas."""


def test_the_search_for_the_packs_name_finds_every_template():
    assert [path.name for path in WORKFLOWS if "parallel" not in path.name] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_templates_have_known_nodes_sound_links_and_a_thumbnail(path):
    workflow = json.loads(path.read_text(encoding="utf-8"))
    nodes = {node["id"]: node for node in workflow["nodes"]}
    types = {node["type"] for node in nodes.values()}
    assert types <= set(NODES) | CORE_NODES
    assert types & {"ParallelLoader", "ParallelCheckpointLoader"}
    for link, source, output, target, slot, _ in workflow["links"]:
        assert link in nodes[source]["outputs"][output]["links"]
        assert nodes[target]["inputs"][slot]["link"] == link
    for node in nodes.values():
        if node["type"] in NODES:
            assert {entry["name"] for entry in node["inputs"]} == set(NODES[node["type"]].inputs)
    assert path.with_suffix(".jpg").is_file()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_templates_say_where_each_file_is_to_be_had(path):
    for node in json.loads(path.read_text(encoding="utf-8"))["nodes"]:
        named = {value for value in node.get("widgets_values") or () if str(value).endswith(".safetensors")}
        entries = {entry["name"]: entry for entry in node.get("properties", {}).get("models", ())}
        assert named == set(entries), node["type"]
        for name, entry in entries.items():
            assert re.fullmatch(rf"https://huggingface\.co/\S+/{re.escape(name)}", entry["url"])
            assert re.fullmatch(r"diffusion_models|checkpoints|text_encoders|vae|loras", entry["directory"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_templates_give_every_input_of_the_configuration_a_value(path):
    nodes = json.loads(path.read_text(encoding="utf-8"))["nodes"]
    for config in (node for node in nodes if node["type"] == "ParallelConfig"):
        assert list(config["widgets_values_named"]) == NODES["ParallelConfig"].inputs
        assert config["widgets_values"] == list(config["widgets_values_named"].values())


def test_the_template_of_pipefusion_has_its_stages_and_keeps_the_loop_in_the_pool():
    workflow = json.loads(
        (ROOT / "example_workflows" / "parallel-flux-dev-pipefusion.json").read_text(encoding="utf-8")
    )
    nodes = {node["type"]: node for node in workflow["nodes"]}
    values = nodes["ParallelConfig"]["widgets_values_named"]
    assert int(values["stages"]) > 1
    assert int(values["patches"]) >= int(values["stages"])  # fewer leave stages idle
    assert values["warmup_steps"] < nodes["ParallelSampler"]["widgets_values_named"]["steps"]
    assert "KSampler" not in nodes
    assert "PipeFusion" in nodes["MarkdownNote"]["widgets_values"][0]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_the_nodes_of_a_template_do_not_overlap(path):
    title = 30  # pixels above a node's position
    boxes = [(*node["pos"], *node["size"]) for node in json.loads(path.read_text(encoding="utf-8"))["nodes"]]
    overlapping = [
        (one, other)
        for index, one in enumerate(boxes)
        for other in boxes[:index]
        if one[0] < other[0] + other[2] and other[0] < one[0] + one[2]
        if one[1] - title < other[1] + other[3] and other[1] - title < one[1] + one[3]
    ]
    assert overlapping == []
