"""FLUX.1-dev whose weights are whole, dealt and in the host's memory: ms per step, on whole cards and on smaller ones.

    python -m benchmarks.flux_weights --ranks 2 --limits 0,24,16    # about 3 minutes; --compile for compiled blocks

Random bf16 weights, written once into --scratch (24 GB). Under a limit a second process holds the rest of each GPU
(in_comfyui/ballast.py). The host must have 24 GB free.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from parallel_runtime.errors import ParallelError
from workers.client.pool_registry import close_pools

from .flux_checkpoint import write_random_flux
from .flux_step import difference, run_pool
from .in_comfyui.ballast import gpus_of
from .in_comfyui.families import ENDING

_FITS = {0: ("whole", "dealt", "host"), 24: ("auto", "dealt", "host")}
"""GiB of a card -> kinds of weights that are tried; of others "auto" and "host"."""


def main() -> None:
    """Measure and print, a row as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--limits", default="0,24,16", help="GiB of each card; 0 leaves it as it is")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--scratch", type=Path, default=Path("/tmp"))
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    path = options.scratch / f"flux-random{ENDING}"
    if not path.exists():
        write_random_flux(path)
    devices = ",".join(map(str, range(options.ranks)))
    print(
        "| GiB | weights | ms per step | ms per call | load, s | first run, s | GiB predicted | used | from whole |\n"
        + "|---" * 9
        + "|"
    )
    whole: torch.Tensor | None = None
    for limit in map(int, options.limits.split(",")):
        with gpus_of(limit, devices):
            for weights in _FITS.get(limit, ("auto", "host")):
                try:
                    row = run_pool(path, options.ranks, options.compile, options.size, options.steps, "auto", weights)
                except ParallelError as error:
                    print(f"| {limit or 'all'} | {weights} | {error} |", flush=True)
                    close_pools()
                    continue
                whole = row["latent"] if whole is None else whole
                print(
                    f"| {limit or 'all'} | {weights} | {row['ms_per_step']:.1f} | {row['ms_per_call']:.1f} | "
                    f"{row['load_seconds']:.1f} | {row['first_run_seconds']:.1f} | "
                    f"{row['memory_gib'][0]:.1f} | {row['memory_gib'][1]:.1f} | "
                    f"{difference(row['latent'], whole):.1e} |",
                    flush=True,
                )
            close_pools()


if __name__ == "__main__":
    main()
