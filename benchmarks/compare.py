"""Ours beside ComfyUI, diffusers and xDiT: the same FLUX.1-dev sized model, weights and inputs, in one run.

    python -m benchmarks.compare --comfyui ~/ComfyUI                     # all, on 1, 2 and 4 GPUs, below 8 minutes
    python -m benchmarks.compare --peers ours,diffusers --ranks 4 --sizes 1024
    python -m benchmarks.compare --tiny --peers ours,diffusers           # on CPUs: do the outputs agree?
    python -m benchmarks.compare --plot benchmarks/results/compare.json  # the plot alone, anywhere

Every case (a peer, a number of GPUs, a size) runs in fresh processes and within a time limit; one that fails, or that
is not installed, becomes a line with the reason. `pip install xfuser` and `pip install matplotlib` for xDiT and for
the plot; ComfyUI's folder comes from --comfyui or $COMFYUI_PATH, and needs its requirements in this Python. Results
are written after each case: compare.json, compare.md and compare.png in --out.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .peers.case import DEFAULT_PEERS, EXTRA_PEERS, PEERS, Case, plan_cases
from .peers.launch import run_case
from .peers.report import describe_machine, plot, table, write

AGREE = {"tiny": 1e-4, "full": 0.02}
"""Relative distance of the final latents up to which two peers computed the same thing: in float32, in bfloat16."""
SHORTEST = 20.0
"""Seconds; a case is not begun with less time left."""

Latents = dict[tuple[str, int, int], torch.Tensor]


def run_cases(
    cases: list[Case], seconds: float, on_row: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    """Run one case after the other, within `seconds` for all; `on_row` gets the rows so far after each."""
    deadline = time.monotonic() + seconds
    rows: list[dict[str, Any]] = []
    latents: Latents = {}
    for case in cases:
        left = deadline - time.monotonic()
        if left < SHORTEST:
            row: dict[str, Any] = {"peer": case.peer, "ranks": case.ranks, "size": case.size}
            rows.append({**row, "reason": f"left out, as the {seconds:.0f} s of --seconds were over"})
        else:
            row, latent = run_case(replace(case, limit=min(case.limit, left)))
            rows.append(row)
            if latent is not None:
                latents[case.peer, case.ranks, case.size] = latent
        compare_latents(rows, latents, AGREE["tiny" if case.tiny else "full"])
        on_row(rows)
    return rows


def compare_latents(rows: list[dict[str, Any]], latents: Latents, limit: float) -> None:
    """Give every row of a size its latent's relative distance to ours on one rank, else to the first there is."""
    for row in rows:
        latent = latents.get((row["peer"], row["ranks"], row["size"]))
        if latent is None:
            continue
        alike = {key: other for key, other in latents.items() if key[2] == row["size"]}
        chosen = next((key for key in alike if key[:2] == ("ours", 1)), next(iter(alike)))
        reference = alike[chosen]
        # An infinity or NaN gives a distance that is not within the limit either.
        distance = ((latent - reference).norm() / reference.norm()).item()
        row["distance"], row["reference"] = distance, list(chosen[:2])
        row["agrees"] = bool(distance <= limit)


def read_options() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = [*DEFAULT_PEERS, *EXTRA_PEERS]
    known = f"some of {', '.join(PEERS)}; by default {', '.join(default)}"
    parser.add_argument("--peers", type=lambda text: text.split(","), default=default, help=known)
    parser.add_argument("--ranks", type=_numbers, help="numbers of GPUs, by default 1,2,4 (--tiny: 1,2)")
    parser.add_argument("--sizes", type=_numbers, help="pixels along a side, by default 1024,2048 (--tiny: 64)")
    parser.add_argument("--comfyui", default=os.environ.get("COMFYUI_PATH", ""), help="its folder")
    parser.add_argument("--limit", type=float, default=120, help="seconds for a case")
    parser.add_argument("--seconds", type=float, default=470, help="for everything")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on CPUs; writes only where --out says")
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--plot", type=Path, metavar="JSON", help="only draw the plot of a finished run, beside it")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    """Run, print, write."""
    options = read_options()
    if options.plot:
        print(plot(json.loads(options.plot.read_text())["rows"], options.plot.with_suffix(".png")))
        return
    ranks = options.ranks or ([1, 2] if options.tiny else [1, 2, 4])
    sizes = options.sizes or ([64] if options.tiny else [1024, 2048])
    out = options.out or (None if options.tiny else Path("benchmarks/results"))
    cases = plan_cases(options.peers, ranks, sizes, options.tiny, options.comfyui, options.limit)
    started = time.monotonic()

    def on_row(rows: list[dict[str, Any]]) -> None:
        print(f"[{time.monotonic() - started:.0f} s] {json.dumps(rows[-1])}", flush=True)
        if out:
            write(rows, describe_machine(rows, options.comfyui), out)

    rows = run_cases(cases, options.seconds, on_row)
    print(f"\n{describe_machine(rows, options.comfyui)['text']}\n\n{table(rows)}")
    if out:
        print(plot(rows, out / "compare.png"))


if __name__ == "__main__":
    main()
