"""Graphs in ComfyUI's API format: the same picture by each way of making it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .families import ENDING, Family
from .host_families import GGUF, HostFamily, file_name

Graph = dict[str, dict[str, Any]]

SAMPLER, SECOND, MARK, SAVE = "sampler", "second", "mark", "save"
BY_DEFAULT = "by default"
"""Devices of a Parallel Loader that no Parallel Config is connected to."""


@dataclass(frozen=True)
class Way:
    """A loader and a sampler node.

    Args:
        devices: of Parallel Config, or BY_DEFAULT; "" is ComfyUI's own loader.
        sampler: node of the sampler.
        weights: of Parallel Config; "" leaves them to it.
        compile: of Parallel Config; "" is what the command line says.
        attention: of Parallel Config; "" leaves it to it.
        weight_dtype: of ComfyUI's own loader.
    """

    devices: str = ""
    sampler: str = "KSampler"
    weights: str = ""
    compile: str = ""
    attention: str = ""
    weight_dtype: str = "default"

    @property
    def title(self) -> str:
        """For tables."""
        if not self.devices:
            return "Load Diffusion Model + KSampler"
        kept = f", weights {self.weights}" if self.weights else ""
        return ("Parallel Loader + KSampler" if self.sampler == "KSampler" else "Parallel Sampler") + kept

    @property
    def gpus(self) -> int:
        """How many devices take part."""
        if self.devices.startswith("cpu:"):
            return int(self.devices.removeprefix("cpu:"))
        return self.devices.count(",") + 1


@dataclass(frozen=True)
class Picture:
    """What a prompt makes. `seed` differs from prompt to prompt, or ComfyUI takes the result out of its cache."""

    family: Family
    file: str
    seed: int
    steps: int
    batch: int = 1


def link(node: str, output: int = 0) -> list[Any]:
    """A connection to a node's output."""
    return [node, output]


def node(kind: str, /, **inputs: Any) -> dict[str, Any]:
    """One node; inputs that are not given get their defaults from `fill`."""
    return {"class_type": kind, "inputs": inputs}


def plain(way: Way, picture: Picture) -> Graph:
    """One model, one sampler."""
    sampling = {
        "model": link("model"),
        "seed": picture.seed,
        "steps": picture.steps,
        "cfg": picture.family.cfg,
        **_method(picture.family),
    }
    return {
        **_surroundings(picture, SAMPLER),
        **load(way, picture.file, "model"),
        SAMPLER: node(way.sampler, **sampling, latent_image=link("latent"), denoise=1.0),
    }


def advanced(way: Way, picture: Picture) -> Graph:
    """One model, and KSampler Advanced from its first step to its last."""
    sampling = {"noise_seed": picture.seed, "steps": picture.steps, "cfg": picture.family.cfg, "start_at_step": 0}
    return {
        **_surroundings(picture, SAMPLER),
        **load(way, picture.file, "model"),
        SAMPLER: node(
            "KSamplerAdvanced",
            model=link("model"),
            add_noise="enable",
            end_at_step=10000,
            return_with_leftover_noise="disable",
            latent_image=link("latent"),
            **sampling,
            **_method(picture.family),
        ),
    }


def custom(way: Way, picture: Picture) -> Graph:
    """One model, and SamplerCustomAdvanced with the nodes that official templates put before it."""
    prompts = {name: link(name) for name in ("positive", "negative")}
    if picture.family.cfg == 1.0:
        guider = node("BasicGuider", model=link("model"), conditioning=link("positive"))
    else:
        guider = node("CFGGuider", model=link("model"), cfg=picture.family.cfg, **prompts)
    return {
        **_surroundings(picture, SAMPLER),
        **load(way, picture.file, "model"),
        "noise": node("RandomNoise", noise_seed=picture.seed),
        "guider": guider,
        **_sampled(picture),
    }


def sampled_by(graph: Graph, name: str) -> Graph:
    """The graph of one KSampler with another sampler."""
    sampler = graph[SAMPLER]
    return {**graph, SAMPLER: {**sampler, "inputs": {**sampler["inputs"], "sampler_name": name}}}


def _sampled(picture: Picture) -> Graph:
    return {
        "method": node("KSamplerSelect", sampler_name="euler"),
        "sigmas": node(
            "BasicScheduler", model=link("model"), scheduler=picture.family.scheduler, steps=picture.steps, denoise=1.0
        ),
        SAMPLER: node(
            "SamplerCustomAdvanced",
            noise=link("noise"),
            guider=link("guider"),
            sampler=link("method"),
            sigmas=link("sigmas"),
            latent_image=link("latent"),
        ),
    }


def with_loras(graph: Graph, loras: Sequence[tuple[str, float]]) -> Graph:
    """The graph with LoRA between its loader and whatever takes its model: files and strengths."""
    last, changed = "model", dict(graph)
    for number, (name, strength) in enumerate(loras):
        inputs = {"lora_name": name, "strength_model": strength}
        changed[f"lora {number}"] = node("LoraLoaderModelOnly", model=link(last), **inputs)
        last = f"lora {number}"
    for name, content in graph.items():
        if content["inputs"].get("model") == link("model"):
            changed[name] = {**content, "inputs": {**content["inputs"], "model": link(last)}}
    return changed


def compiled_by_comfyui(graph: Graph) -> Graph:
    """The graph with ComfyUI's own node that compiles a model."""
    sampler = graph[SAMPLER]
    return {
        **graph,
        "compiled": node("TorchCompileModel", model=link("model"), backend="inductor"),
        SAMPLER: {**sampler, "inputs": {**sampler["inputs"], "model": link("compiled")}},
    }


def anew(graph: Graph, number: int = 1) -> Graph:
    """The same picture, which ComfyUI cannot take out of its cache where the number is another."""
    text = graph["positive"]
    return {**graph, "positive": {**text, "inputs": {**text["inputs"], "again": number}}}


def step_by_step(graph: Graph) -> Graph:
    """The graph with a node before the sampler that keeps its loop in ComfyUI."""
    sampler = graph[SAMPLER]
    return {
        **graph,
        "looked": node("BenchmarkLooked", model=link("model")),
        SAMPLER: {**sampler, "inputs": {**sampler["inputs"], "model": link("looked")}},
    }


def decoded(graph: Graph, picture: Picture) -> Graph:
    """The graph with the latent decoded and the image saved."""
    prefix = graph[SAVE]["inputs"]["filename_prefix"]
    return {
        **graph,
        "vae": node("VAELoader", vae_name=picture.family.name + ENDING),
        "image": node("VAEDecode", samples=link(MARK), vae=link("vae")),
        "save image": node("SaveImage", images=link("image"), filename_prefix=prefix),
    }


def controlled(graph: Graph, picture: Picture, net: str) -> Graph:
    """The graph with a Union ControlNet on its prompts from the first step to the last.

    Args:
        net: its file.
    """
    width, height = picture.family.size
    sampler = graph[SAMPLER]
    prompts = {name: link("control", slot) for slot, name in enumerate(("positive", "negative"))}
    return {
        **graph,
        "control vae": node("VAELoader", vae_name=picture.family.name + ENDING),
        "control picture": node("EmptyImage", width=width, height=height, batch_size=1, color=0x7F5030),
        "control file": node("ControlNetLoader", control_net_name=net),
        "control net": node("SetUnionControlNetType", control_net=link("control file"), type="depth"),
        "control": node(
            "ControlNetApplyAdvanced",
            positive=link("positive"),
            negative=link("negative"),
            control_net=link("control net"),
            image=link("control picture"),
            vae=link("control vae"),
            strength=0.7,
            start_percent=0.0,
            end_percent=1.0,
        ),
        SAMPLER: {**sampler, "inputs": {**sampler["inputs"], **prompts}},
    }


def two_experts(way: Way, picture: Picture, second: str) -> Graph:
    """Two models in turn, each for half of the steps, as Wan 2.2's templates have them."""
    half = picture.steps // 2
    common = {"steps": picture.steps, "cfg": picture.family.cfg, **_method(picture.family), "noise_seed": picture.seed}
    return {
        **_surroundings(picture, SECOND),
        **load(way, picture.file, "model"),
        **load(way, second, "model 2"),
        SAMPLER: node(
            "KSamplerAdvanced",
            model=link("model"),
            add_noise="enable",
            start_at_step=0,
            end_at_step=half,
            return_with_leftover_noise="enable",
            latent_image=link("latent"),
            **common,
        ),
        SECOND: node(
            "KSamplerAdvanced",
            model=link("model 2"),
            add_noise="disable",
            start_at_step=half,
            end_at_step=10000,
            return_with_leftover_noise="disable",
            latent_image=link(SAMPLER),
            **common,
        ),
    }


def load(way: Way, file: str, name: str) -> Graph:
    """A loader, and its configuration where it has one."""
    if not way.devices:
        if file_name(file).endswith(GGUF):
            return {name: node("UnetLoaderGGUF", unet_name=file_name(file))}
        return {name: node("UNETLoader", unet_name=file_name(file), weight_dtype=way.weight_dtype)}
    loader = {"model_name": file_name(file)}
    if way.devices == BY_DEFAULT:
        return {name: node("ParallelLoader", **loader)}
    wishes = {key: value for key in ("weights", "compile", "attention") if (value := getattr(way, key))}
    return {
        f"{name} config": node("ParallelConfig", devices=way.devices, **wishes),
        name: node("ParallelLoader", **loader, parallel_config=link(f"{name} config")),
    }


def _method(family: Family) -> dict[str, Any]:
    return {
        "sampler_name": "euler",
        "scheduler": family.scheduler,
        "positive": link("positive"),
        "negative": link("negative"),
    }


def _surroundings(picture: Picture, last: str) -> Graph:
    family = picture.family
    width, height = family.size
    size = {
        "width": width,
        "height": height,
        "batch_size": picture.batch,
        **({"length": family.frames} if family.frames else {}),
    }
    text = {
        "length": family.text.length,
        "width": family.text.width,
        "pooled": family.text.pooled,
        "guidance": family.text.guidance,
    }
    latent = node(family.latent, **size)
    if isinstance(family, HostFamily) and family.latents:
        latent = node("BenchmarkLatents", shapes=json.dumps(family.latents))
    return {
        "positive": node("BenchmarkText", seed=11, **text),
        "negative": node("BenchmarkText", seed=22, **text),
        "latent": latent,
        MARK: node("BenchmarkMark", samples=link(last)),
        SAVE: node("SaveLatent", samples=link(MARK), filename_prefix=f"benchmark/{picture.file}-{picture.seed}"),
    }
