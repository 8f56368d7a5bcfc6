"""API-format workflows for the host tests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

Prompt = dict[str, dict[str, Any]]

MODEL = "tiny.safetensors"
OF_FLUX = ("schnell.safetensors", "canny.safetensors")
"""Files that are FLUX.1 in every ComfyUI."""
SAVE, SAMPLER, LOADER = "save", "sampler", "loader"
FIRST = "first"
"""Node of the first of two samplers."""


def link(node: str, output: int = 0) -> list[Any]:
    """A connection to a node's output."""
    return [node, output]


def node(kind: str, /, **inputs: Any) -> dict[str, Any]:
    """One node."""
    return {"class_type": kind, "inputs": inputs, "_meta": {"title": kind}}


def sampled_in_pool(texts: list[tuple[str, str]]) -> bool:
    """Whether the sampler says what ran, and of no loop that went step by step."""
    told = [text for node, text in texts if node == "sampler"]
    return any("Latent " in text for text in told) and not any("step by step" in text for text in told)


@dataclass(frozen=True)
class Workflow:
    """A picture's settings; `prompt` makes the graph of them.

    Args:
        loader: "native" (Load Diffusion Model), or the devices of Parallel Config.
        sampler_node: KSampler, ParallelSampler, KSamplerAdvanced, SamplerCustom or SamplerCustomAdvanced.
        split: step at which another sampler goes on, of the last two kinds; 0 is none.
        lengths: tokens of the positive and the negative prompt.
        latent: seed (0 is empty), batch, height, width.
        taken: first and number of the pictures that Latent From Batch takes out; none takes all.
        reference: the positive prompt has a reference latent (Kontext).
        stages: stages, patches and warm-up steps of PipeFusion, if any.
        patch: kind of the test pack's change on the MODEL, if any.
        attention: of Parallel Config.
    """

    loader: str = "native"
    sampler_node: str = "KSampler"
    sampler: str = "euler"
    scheduler: str = "simple"
    cfg: float = 1.0
    steps: int = 4
    split: int = 0
    seed: int = 5
    denoise: float = 1.0
    lengths: tuple[int, int] = (7, 7)
    latent: tuple[int, int, int, int] = (0, 1, 14, 20)
    taken: tuple[int, int] | None = None
    mask: bool = False
    flux_shift: bool = False
    broken: bool = False
    reference: bool = False
    stages: tuple[int, int, int] | None = None
    patch: str = ""
    model: str = MODEL
    weight_dtype: str = "default"
    attention: str = "auto"

    def on(self, loader: str, sampler_node: str | None = None) -> Workflow:
        """The same picture with another loader, and another sampler node if given."""
        return replace(self, loader=loader, sampler_node=sampler_node or self.sampler_node)

    def prompt(self) -> Prompt:
        """The graph."""
        seed, batch, height, width = self.latent
        latent = node("TestRandomLatent", seed=seed, batch=batch, height=height, width=width, broken=self.broken)
        graph = {**self._model(), "latent": latent}
        for name, length, number in zip(("positive", "negative"), self.lengths, (11, 22), strict=True):
            graph[name] = node("TestRandomConditioning", seed=number, length=length, width=64, pooled=32, guidance=3.0)
        if self.reference:
            graph["picture"] = node("TestRandomLatent", seed=8, batch=1, height=10, width=12, broken=False)
            graph["text"] = graph["positive"]
            graph["positive"] = node("ReferenceLatent", conditioning=link("text"), latent=link("picture"))
        if self.mask:
            graph["mask"] = node("TestRandomMask", seed=3, height=height * 8, width=width * 8)
            graph["masked"] = node("SetLatentNoiseMask", samples=link("latent"), mask=link("mask"))
        if self.taken:
            first, count = self.taken
            graph["batch"] = graph["latent"]
            graph["latent"] = node("LatentFromBatch", samples=link("batch"), batch_index=first, length=count)
        graph |= self._sampling(link("model"), link("masked" if self.mask else "latent"))
        graph[SAVE] = node("SaveLatent", samples=link(SAMPLER), filename_prefix="latents/test")
        return graph

    @property
    def _native_loader(self) -> dict[str, Any]:
        """Load Diffusion Model, which has float8 types alone, or for GGUF files its pack's loader."""
        if self.model.endswith(".gguf"):
            return node("UnetLoaderGGUF", unet_name=self.model)
        dtype = self.weight_dtype if self.weight_dtype.startswith("fp8") else "default"
        return node("UNETLoader", unet_name=self.model, weight_dtype=dtype)

    def _model(self) -> Prompt:
        if self.loader == "native":
            loaded = {LOADER: self._native_loader}
        else:
            auto = dict.fromkeys(("cfg", "data", "ulysses"), "auto") | {"attention": self.attention}
            piped: dict[str, Any] = {}
            if self.stages is not None:
                stages, patches, warmup = self.stages
                piped = {"stages": str(stages), "patches": str(patches), "warmup_steps": warmup}
            loaded = {
                "config": node("ParallelConfig", devices=self.loader, compile="off", **auto, **piped),
                LOADER: node(
                    "ParallelLoader",
                    model_name=self.model,
                    weight_dtype=self.weight_dtype,
                    parallel_config=link("config"),
                ),
            }
        last = LOADER
        if self.patch:
            loaded["patched"] = node("TestModelPatch", model=link(last), kind=self.patch)
            last = "patched"
        if self.flux_shift:
            loaded["model"] = node(
                "ModelSamplingFlux", model=link(last), max_shift=1.15, base_shift=0.5, width=512, height=768
            )
            return loaded
        return _rename(loaded, last, "model")

    def _sampling(self, model: list[Any], latent: list[Any]) -> Prompt:
        conds = {"positive": link("positive"), "negative": link("negative")}
        if self.sampler_node.startswith("SamplerCustom"):
            return self._custom_sampling(model, latent, conds)
        common = {
            "model": model,
            "steps": self.steps,
            "cfg": self.cfg,
            "sampler_name": self.sampler,
            "scheduler": self.scheduler,
            "latent_image": latent,
            **conds,
        }
        if self.sampler_node == "KSamplerAdvanced":
            steps = {"start_at_step": 1, "end_at_step": self.steps - 1, "return_with_leftover_noise": "enable"}
            return {SAMPLER: node("KSamplerAdvanced", add_noise="enable", noise_seed=self.seed, **common, **steps)}
        return {SAMPLER: node(self.sampler_node, seed=self.seed, denoise=self.denoise, **common)}

    def _custom_sampling(self, model: list[Any], latent: list[Any], conds: dict[str, list[Any]]) -> Prompt:
        """Samplers that take sigmas: one, or two of which the second goes on with the first one's latent."""
        graph = {
            "method": node("KSamplerSelect", sampler_name=self.sampler),
            "sigmas": node(
                "BasicScheduler", model=model, scheduler=self.scheduler, steps=self.steps, denoise=self.denoise
            ),
        }
        advanced = self.sampler_node == "SamplerCustomAdvanced"
        if advanced:
            graph["guider"] = node("CFGGuider", model=model, cfg=self.cfg, **conds)
        parts = [(SAMPLER, latent, link("sigmas"))]
        if self.split:
            graph["parts"] = node("SplitSigmas", sigmas=link("sigmas"), step=self.split)
            parts = [(FIRST, latent, link("parts")), (SAMPLER, link(FIRST), link("parts", 1))]
        for number, (name, start, sigmas) in enumerate(parts):
            inputs: dict[str, Any] = {"sampler": link("method"), "sigmas": sigmas, "latent_image": start}
            if advanced:
                noise = f"noise {name}"
                graph[noise] = node("DisableNoise") if number else node("RandomNoise", noise_seed=self.seed)
                inputs |= {"noise": link(noise), "guider": link("guider")}
            else:
                inputs |= {"model": model, "add_noise": not number, "noise_seed": self.seed, "cfg": self.cfg, **conds}
            graph[name] = node(self.sampler_node, **inputs)
        return graph


def _rename(graph: Prompt, old: str, new: str) -> Prompt:
    return {new if name == old else name: content for name, content in graph.items()}


def put_control(graph: Prompt, net: dict[str, Any], settings: dict[str, Any], vae: dict[str, Any]) -> None:
    """Have a ControlNet applied to a graph's prompts.

    Args:
        net: the node that gives it.
        settings: of Apply ControlNet: strength, start and end.
        vae: the node that gives what encodes the picture.
    """
    graph |= {"vae": vae, "net": net, "picture": node("TestRandomImage", seed=5, height=96, width=128)}
    for name in ("positive", "negative"):
        graph[f"{name} before"] = graph.pop(name)
    graph["apply"] = node(
        "ControlNetApplyAdvanced", positive=link("positive before"), negative=link("negative before"),
        control_net=link("net"), image=link("picture"), vae=link("vae"), **settings,
    )  # fmt: skip
    for slot, name in enumerate(("positive", "negative")):
        graph[name] = node("ConditioningSetTimestepRange", conditioning=link("apply", slot), start=0.0, end=1.0)
