"""A changed text where text encoder and model do not fit one GPU: with the encoder there, and on another one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from ..bench import COMPARED_SEED, Bench, Found
from ..graphs import Graph, Way, link, node, plain
from ..whole_prompts import WHOLE, Whole, text, texts
from .prompts import make_encoders, seconds_of_parts

_CHANGES = 3


def encoder(bench: Bench, found: Found, file: str, way: Way, place: int) -> None:
    """A first prompt and some with another text. The last one's latent must not depend on where the encoder is.

    Args:
        place: GPU of the text encoder, by ComfyUI's *Select CLIP Device*.
    """
    whole = WHOLE[file]
    family = replace(bench.family(file), cfg=1.0)
    found |= {"kind": "prompts", "file": file, "model": f"{family.described}, {', '.join(whole.encoders)}"}
    found |= {"way": f"{way.title}, text encoder on GPU {place}", "gpus": way.gpus}
    make_encoders(bench, whole)
    for number in range(1 + _CHANGES):
        picture = replace(bench.picture(file, seed=COMPARED_SEED), family=family)
        graph = _graph(whole, plain(way, picture), text(number), place, bench.cpu)
        run = bench.run(graph)
        row = {"what": "other text" if number else "first", "all s": round(run.seconds, 3)}
        row |= {"first step s": round(run.first_step, 2), **seconds_of_parts(graph, run)}
        found.setdefault("rows", []).append(row)
        found["texts"] = run.texts
    if run.saved is not None:
        elsewhere = bench.latents.setdefault((f"{file} encoder", False), run.saved)
        if elsewhere != run.saved:
            found["same bits as with the encoder elsewhere"] = _latent(elsewhere).equal(_latent(run.saved))


def _latent(path: Path) -> torch.Tensor:
    return load_file(path)["latent_tensor"]


def _graph(whole: Whole, graph: Graph, words: str, place: int, small: bool) -> Graph:
    encoded = texts(whole, words, graph["positive"] if small else None)
    encoded["clip placed"] = node("SelectCLIPDevice", clip=link("clip"), device=f"gpu:{place}")
    encoded["encoded" if "encoded" in encoded else "positive"]["inputs"]["clip"] = link("clip placed")
    return {**graph, **encoded}
