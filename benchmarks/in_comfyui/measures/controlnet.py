"""What a ControlNet adds to a step: it runs in ComfyUI's process, and its residuals go to the ranks with each step."""

from __future__ import annotations

import time

from ..bench import COMPARED_SEED, Bench, Found, mean_step, per_step
from ..control_files import REAL, TINY, Blocks, write_union
from ..families import ENDING
from ..graphs import Way, controlled, plain

_ROUNDS = 2
"""Prompts with and without it, after the first ones: the first of them records CUDA graphs."""


def controlnet(bench: Bench, found: Found, file: str, way: Way) -> None:
    """Prompts without and with a Union ControlNet in turn, until graphs that are made beside them are in use."""
    blocks: Blocks = TINY if bench.cpu else REAL
    net = f"{file} union{ENDING}"
    write_union(bench.server.base / "models" / "controlnet" / net, bench.family(file), blocks)
    title = f"{bench.family(file).described}, union of {blocks.double} and {blocks.single} blocks"
    found |= {"kind": "controlnet", "model": title, "way": way.title, "gpus": way.gpus}

    bench.make(way, file)
    first = bench.run(controlled(plain(way, picture := bench.picture(file, seed=COMPARED_SEED)), picture, net))
    found |= {
        "first prompt s": round(first.seconds, 2),
        "distance": bench.distance(f"{file} controlnet", way, first),
    }
    for number in range(_ROUNDS):
        without = bench.make(way, file)
        picture = bench.picture(file)
        run = bench.run(controlled(plain(way, picture), picture, net))
        found |= {
            "ms": per_step(run),
            "ms mean": mean_step(run),
            "ms without": per_step(without),
            "later prompt s": round(run.seconds, 2),
            "rounds": number + 1,
        }
        if time.monotonic() + 3 * run.seconds > bench.deadline:
            break
