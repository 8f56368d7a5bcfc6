"""Templates made small enough to run: widgets by name, sizes cut, encoders replaced, the rest as it is."""

from __future__ import annotations

import json

import pytest

from benchmarks.template_coverage.execution import draw, executable
from benchmarks.template_coverage.judgement import judge
from benchmarks.template_coverage.node_schema import widget_values
from benchmarks.template_coverage.prompt_graph import Node, read_prompt
from benchmarks.template_coverage.small_files import FILES, small_files
from benchmarks.template_coverage.small_prompt import CannotStandIn, SmallPrompt
from benchmarks.template_coverage.totals import Judged
from tests.comfyui_networks.files import FILES as WRITTEN
from tests.comfyui_networks.large_files import LARGE_FILES
from tests.template_graphs import Graph, load


def _info(**inputs):
    return {"input": {"required": {name: (kind, {}) for name, kind in inputs.items()}}}


KSAMPLER = _info(
    model="MODEL", seed="INT", steps="INT", cfg="FLOAT", sampler_name=["euler"], scheduler=["simple"],
    positive="CONDITIONING", negative="CONDITIONING", latent_image="LATENT", denoise="FLOAT",
)  # fmt: skip
INFOS = {
    "KSampler": KSAMPLER,
    "CLIPTextEncode": _info(text="STRING", clip="CLIP"),
    "EmptySD3LatentImage": _info(width="INT", height="INT", batch_size="INT"),
    **{f"StandIn{kind}": {} for kind in ("CLIP", "VAE", "IMAGE")},
}


def _graph(loader: str = "CLIPLoader", gives: str = "CLIP") -> Graph:
    graph = Graph()
    text = graph.add("CLIPTextEncode", "CONDITIONING", widgets=["a cat"], clip=("CLIP", graph.add(loader, gives)))
    width = graph.add("PrimitiveInt", "INT", widgets=[1536, "fixed"])
    latent = graph.add("EmptySD3LatentImage", "LATENT", widgets=[1024, 512, 4], width=("INT", width))
    model = load(graph, "flux1-dev.safetensors")
    sampled = graph.add(
        "KSampler", "LATENT", widgets=[7, "randomize", 20, 3.5, "euler", "simple", 1.0],
        model=("MODEL", model), positive=("CONDITIONING", text), negative=("CONDITIONING", text),
        latent_image=("LATENT", latent),
    )  # fmt: skip
    image = graph.add("VAEDecode", "IMAGE", samples=("LATENT", sampled), vae=("VAE", graph.add("VAELoader", "VAE")))
    graph.add("SaveImage", images=("IMAGE", image))
    return graph


def _small(graph: Graph) -> SmallPrompt:
    files = small_files(["flux1-dev.safetensors"])
    infos = {**INFOS, "PrimitiveInt": _info(value="INT")}
    return SmallPrompt("a template", read_prompt(graph.workflow()), files.__getitem__, infos)


def test_a_prompt_is_the_templates_from_its_loader_to_its_sampler_and_small():
    small = _small(_graph())
    made = small.make(None, "/there")
    kinds = sorted(content["class_type"] for content in made.values())
    wanted = ["CLIPTextEncode", "EmptySD3LatentImage", "KSampler", "StandInCLIP", "StandInSaveSampled", "UNETLoader"]
    assert kinds == wanted
    assert small.samplers == 1
    by_kind = {content["class_type"]: content["inputs"] for content in made.values()}
    assert by_kind["EmptySD3LatentImage"] == {"width": 96, "height": 64, "batch_size": 2}
    sampler = by_kind["KSampler"]
    assert (sampler["seed"], sampler["steps"], sampler["cfg"], sampler["denoise"]) == (7, 3, 3.5, 1.0)
    assert by_kind["UNETLoader"]["unet_name"] == "flux.safetensors"
    assert json.loads(by_kind["StandInCLIP"]["spec"])["width"] == 48
    # With our loader nothing else is different.
    parallel = small.make("cpu:2", "/there")
    assert parallel.pop("config")["inputs"]["devices"] == "cpu:2"
    (loader,) = [name for name, content in parallel.items() if content["class_type"] == "ParallelLoader"]
    assert {name: content for name, content in parallel.items() if name != loader} == {
        name: content for name, content in made.items() if name != loader
    }


def test_what_nothing_stands_in_for_is_named():
    with pytest.raises(CannotStandIn, match="LoaderOfTomorrow gives THING"):
        _small(_graph("LoaderOfTomorrow", "THING")).make(None, "/there")


def test_a_stand_in_has_the_shapes_of_the_model_that_it_serves():
    """Of two MODELs after one another each text encoder serves the sampler behind it, and a decoder the one before."""
    graph = Graph()
    latent = graph.add("EmptySD3LatentImage", "LATENT", widgets=[1024, 512, 1])
    for file in ("sd_xl_base_1.0.safetensors", "flux1-dev.safetensors"):
        clip = graph.add("CLIPLoader", "CLIP")
        text = graph.add("CLIPTextEncode", "CONDITIONING", widgets=[file], clip=("CLIP", clip))
        latent = graph.add(
            "KSampler", "LATENT", widgets=[7, "randomize", 20, 3.5, "euler", "simple", 1.0],
            model=("MODEL", load(graph, file)), positive=("CONDITIONING", text), negative=("CONDITIONING", text),
            latent_image=("LATENT", latent),
        )  # fmt: skip
        vae = graph.add("VAELoader", "VAE")
        image = graph.add("VAEDecode", "IMAGE", samples=("LATENT", latent), vae=("VAE", vae))
        latent = graph.add("VAEEncode", "LATENT", pixels=("IMAGE", image), vae=("VAE", vae))
    graph.add("SaveImage", images=("IMAGE", image))
    files = small_files(["sd_xl_base_1.0.safetensors", "flux1-dev.safetensors"])
    infos = {**INFOS, "VAEDecode": _info(samples="LATENT", vae="VAE"), "VAEEncode": _info(pixels="IMAGE", vae="VAE")}
    made = SmallPrompt("two", read_prompt(graph.workflow()), files.__getitem__, infos).make(None, "/there")
    specs = {kind: [json.loads(each["inputs"]["spec"]) for each in made.values() if each["class_type"] == kind]
             for kind in ("StandInCLIP", "StandInVAE")}  # fmt: skip
    assert sorted(spec["width"] for spec in specs["StandInCLIP"]) == [48, 2048]
    assert [spec["vae"]["channels"] for spec in specs["StandInVAE"]] == [4]


@pytest.mark.parametrize(("start", "wanted"), [(20, 2), (10, 2), (0, 0), (25, 3)])
def test_a_sampler_that_goes_on_after_another_has_a_step(start, wanted):
    graph = Graph()
    latent = graph.add("EmptySD3LatentImage", "LATENT", widgets=[1024, 512, 1])
    text = graph.add("CLIPTextEncode", "CONDITIONING", widgets=["a"], clip=("CLIP", graph.add("CLIPLoader", "CLIP")))
    sampled = graph.add(
        "KSamplerAdvanced", "LATENT", widgets=[25, start], model=("MODEL", load(graph, "flux1-dev.safetensors")),
        positive=("CONDITIONING", text), negative=("CONDITIONING", text), latent_image=("LATENT", latent),
    )  # fmt: skip
    graph.add("SaveLatent", samples=("LATENT", sampled))
    links = {"model": "MODEL", "positive": "CONDITIONING", "negative": "CONDITIONING", "latent_image": "LATENT"}
    infos = {**INFOS, "KSamplerAdvanced": _info(steps="INT", start_at_step="INT", **links)}
    files = small_files(["flux1-dev.safetensors"])
    made = SmallPrompt("late", read_prompt(graph.workflow()), files.__getitem__, infos).make(None, "/there")
    (inputs,) = [each["inputs"] for each in made.values() if each["class_type"] == "KSamplerAdvanced"]
    assert (inputs["steps"], inputs["start_at_step"]) == (3, wanted)


def test_a_dynamic_choice_decides_which_widgets_follow():
    options = [
        {"key": "by sides", "inputs": {"required": {"width": ("INT", {}), "height": ("INT", {})}}},
        {"key": "by factor", "inputs": {"required": {"factor": ("FLOAT", {})}}},
    ]
    required = {"image": ("IMAGE", {}), "how": ("COMFY_DYNAMICCOMBO_V3", {"options": options}), "crop": (["no"], {})}
    info = {"input": {"required": required}}
    for saved, wanted in (
        (["by sides", 640, 480, "no"], {"how": "by sides", "how.width": 640, "how.height": 480, "crop": "no"}),
        (["by factor", 0.5, "no"], {"how": "by factor", "how.factor": 0.5, "crop": "no"}),
    ):
        assert widget_values(Node((1,), "Resize", "", saved=saved), info) == wanted
    promoted = Node((1,), "Resize", "", saved=["by factor", 0.5, "no"], promoted={"how.factor": 2.0})
    assert widget_values(promoted, info)["how.factor"] == 2.0


def test_files_of_one_family_have_weights_of_their_own():
    files = small_files(["wan2.2_i2v_high_noise_14B_fp8_scaled.safetensors", "wan2.2_i2v_low_noise.safetensors"])
    assert [file.name for file in files.values()] == ["wan-22-i2v.safetensors", "wan-22-i2v-2.safetensors"]
    for file in ("hidream_i1_full_fp8.safetensors", "seedvr2_3b_int8_convrot.safetensors"):
        assert small_files([file]) is None
    assert {key for _, key, _ in FILES if key} <= WRITTEN.keys() | LARGE_FILES.keys() | {"sdxl"}


def test_a_sample_has_every_family_before_any_twice():
    def judged(name: str, file: str) -> Judged:
        graph = Graph()
        sampled = graph.add("KSampler", "LATENT", model=("MODEL", load(graph, file)))
        graph.add("SaveLatent", samples=("LATENT", sampled))
        return Judged(name, 1, judge(read_prompt(graph.workflow())))

    names = {f"flux {number}": "flux1-dev.safetensors" for number in range(9)}
    names |= {"krea": "krea2_turbo.safetensors", "lens": "lens_bf16.safetensors", "not small": "hidream_i1.safetensors"}
    able = executable([judged(name, file) for name, file in names.items()])
    assert len(able) == 11
    for seed in range(5):
        drawn = {each.name for each in draw(able, 3, seed)}
        assert {"krea", "lens"} < drawn
        assert drawn == {each.name for each in draw(able, 3, seed)}
