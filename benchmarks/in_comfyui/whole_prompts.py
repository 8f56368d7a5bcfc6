"""Whole prompts, from the text to the saved file: what each family takes, and its graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .encoders import ENCODERS
from .families import TWIN
from .graphs import MARK, SAMPLER, SAVE, SECOND, Graph, Picture, Way, custom, link, node, plain, two_experts
from .vaes import vae_file


@dataclass(frozen=True)
class Whole:
    """A family's prompt, as official templates have it.

    Args:
        file: its model.
        steps: in all; without CFG.
        encoders: names in ENCODERS; two are loaded together.
        type: of the node that loads them.
        vae: name of a VAE's file.
        guidance: for FluxGuidance; 0: none.
        custom: sampled by SamplerCustomAdvanced.
        twins: two experts take half of the steps each.
        rate: frames a second of a video that is saved; 0: a picture is.
        again: later prompts of a seed at most; the last one counts.
    """

    file: str
    steps: int
    encoders: tuple[str, ...]
    type: str
    vae: str
    guidance: float = 0.0
    custom: bool = False
    twins: bool = False
    rate: int = 0
    again: int = 4

    def vae_of(self, small: bool) -> str:
        """Name of its VAE."""
        return _STAND_INS.get(self.file, self.vae) if small else self.vae

    @property
    def files(self) -> tuple[str, ...]:
        """Model files."""
        return (self.file, self.file + TWIN) if self.twins else (self.file,)


WHOLE = {
    whole.file: whole
    for whole in (
        Whole("own-flux", 28, ("clip-l", "t5"), "flux", "flux", guidance=3.5, again=2),
        Whole("klein", 4, ("qwen-3",), "flux2", "flux2", custom=True),
        Whole("own-z-image", 8, ("qwen-3",), "lumina2", "flux"),
        Whole("own-qwen", 4, ("qwen-2.5",), "qwen_image", "wan"),
        Whole("own-wan", 4, ("umt5",), "wan", "wan", twins=True, rate=16, again=1),
        Whole("own-ltx", 8, ("gemma", "ltx-projection"), "ltxv", "ltx", custom=True, rate=25, again=2),
        Whole("own-h3", 4, ("qwen-3-vl",), "minimax", "h3", custom=True, rate=24, again=2),
    )
}
SMALL = ("clip-l",)
"""The encoder that runs with --cpu in place of a family's; a tiny model then takes numbers of a seed."""
_STAND_INS = {"own-qwen": "flux"}
"""VAEs with --cpu of those for whose tiny model a FLUX stands."""

_WORDS = "a lighthouse on a rocky coast at dusk, waves, gulls, warm light in the windows, painted in oil, {}, detailed"
_SKIES = ("clear sky", "heavy clouds", "light rain", "thick fog")


def text(number: int) -> str:
    """The text of a prompt; another number, another text."""
    return _WORDS.format(f"{_SKIES[number % len(_SKIES)]} number {number}")


def whole_graph(whole: Whole, way: Way, picture: Picture, words: str, parallel_vae: bool, small: bool) -> Graph:
    """The graph of a whole prompt.

    Args:
        parallel_vae: Parallel VAE is before VAE Decode.
        small: see SMALL.
    """
    if whole.twins:
        graph, last = two_experts(way, picture, whole.file + TWIN), SECOND
    else:
        graph, last = (custom if whole.custom else plain)(way, picture), SAMPLER
    graph = {name: content for name, content in graph.items() if name not in (MARK, SAVE)}
    return {
        **graph,
        **texts(whole, words, graph["positive"] if small else None),
        **_decoded(graph, last, whole.vae_of(small), parallel_vae),
        **_saved(whole),
    }


def texts(whole: Whole, words: str, stand_in: Mapping[str, object] | None) -> Graph:
    """What encodes its text.

    Args:
        stand_in: a node of random text in whose place the smallest encoder runs; None: the family's own encoders.
    """
    names = whole.encoders if stand_in is None else SMALL
    kind = whole.type if stand_in is None else "stable_diffusion"
    files = [ENCODERS[name].file for name in names]
    if len(files) == 1:
        clip = node("CLIPLoader", clip_name=files[0], type=kind)
    else:
        clip = node("DualCLIPLoader", clip_name1=files[0], clip_name2=files[1], type=kind)
    graph = {
        "clip": clip,
        "positive": node("CLIPTextEncode", clip=link("clip"), text=words),
        "negative": node("ConditioningZeroOut", conditioning=link("positive")),
    }
    if stand_in is not None:
        graph["encoded"] = graph["positive"]
        numbers = dict(stand_in["inputs"])  # type: ignore[call-overload]
        graph["positive"] = node("BenchmarkText", **numbers, encoded=link("encoded"))
    elif whole.guidance:
        graph["encoded"] = graph["positive"]
        graph["positive"] = node("FluxGuidance", conditioning=link("encoded"), guidance=whole.guidance)
    return graph


def _decoded(sampled: Graph, last: str, name: str, parallel: bool) -> Graph:
    graph, vae = {"vae": node("VAELoader", vae_name=vae_file(name))}, link("vae")
    if parallel:
        graph["parallel vae"] = node("ParallelVAE", vae=vae, parallel_config=link("model config"))
        vae = link("parallel vae")
    if sampled["latent"]["class_type"] == "BenchmarkLatents":  # frames and sound: the frames are decoded
        graph["apart"], last = node("LTXVSeparateAVLatent", av_latent=link(last)), "apart"
    return graph | {"picture": node("VAEDecode", samples=link(last), vae=vae)}


def _saved(whole: Whole) -> Graph:
    prefix = f"benchmark/{whole.file}"
    if not whole.rate:
        return {"save": node("SaveImage", images=link("picture"), filename_prefix=prefix)}
    return {
        "video": node("CreateVideo", images=link("picture"), fps=float(whole.rate)),
        "save": node("SaveVideo", video=link("video"), filename_prefix=prefix, format="mp4", codec="h264"),
    }


PARTS = ("text", "load", "steps", "decode", "save")
_PART_OF = {
    "CLIPTextEncode": "text", "ConditioningZeroOut": "text", "FluxGuidance": "text", "BenchmarkText": "text",
    "CLIPLoader": "load", "DualCLIPLoader": "load", "VAELoader": "load", "UNETLoader": "load",
    "ParallelConfig": "load", "ParallelLoader": "load", "ParallelVAE": "load",
    "LTXVSeparateAVLatent": "decode", "VAEDecode": "decode",
    "CreateVideo": "save", "SaveImage": "save", "SaveVideo": "save",
}  # fmt: skip


def part_of(kind: str) -> str:
    """Which part a node's seconds belong to, by its class; those of a sampler, and what goes before it, are steps."""
    return _PART_OF.get(kind, "steps")
