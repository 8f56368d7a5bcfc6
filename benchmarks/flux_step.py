"""FLUX.1-dev size on real GPUs: milliseconds per step from the client to the latent, beside plain diffusers.

    python -m benchmarks.flux_step --ranks 1,2 --sizes 1024 --steps 12 --out DIR

Random bf16 weights, written once as a checkpoint file in --scratch (24 GB). Everything in one run on one machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from parallel_runtime.config import ParallelConfig
from workers.client.client import Branch, LoopRequest, ModelRequest
from workers.client.pool_registry import close_pools, get_pool

from .flux_checkpoint import write_random_flux

TEXT_TOKENS = 512
CALLS_UP_TO = 1024
"""Largest size that is also measured call by call, and in eager mode on several GPUs and in diffusers."""
NOTE = """Differences are relative distances of the finished latents. Plain diffusers rounds the timestep to bfloat16
before it scales it, and we do not: where the sigmas are no bfloat16 numbers, that is the difference between the two,
on any number of GPUs. What our own runs differ by is bfloat16 rounding in another order."""
LARGE_STEPS = 6
"""Steps at larger sizes."""


def inputs(size: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Start latent (1, 16, size / 8, size / 8) and text of FLUX.1-dev, from a fixed seed."""
    generator = torch.Generator().manual_seed(size)
    return {
        "x": torch.randn(1, 16, size // 8, size // 8, generator=generator).to(device),
        "context": torch.randn(1, TEXT_TOKENS, 4096, generator=generator).bfloat16().to(device),
        "y": torch.randn(1, 768, generator=generator).bfloat16().to(device),
        "guidance": torch.tensor([3.5], device=device),
    }


def steps_at(size: int, steps: int) -> int:
    """Return how many steps are taken at a size."""
    return steps if size <= CALLS_UP_TO else min(steps, LARGE_STEPS)


def per_step(times: list[float]) -> float:
    """Median milliseconds between the ends of steps; the first step and its warm-up are left out."""
    return statistics.median(b - a for a, b in itertools.pairwise(times[1:])) * 1000


def run_pool(
    path: Path, ranks: int, compiled: bool, size: int, steps: int, attention: str, weights: str = "auto"
) -> dict[str, Any]:
    """Sample through the pool: once to warm up, once measured; then one call per step, as KSampler does."""
    config = ParallelConfig(
        devices=",".join(map(str, range(ranks))),
        compile="on" if compiled else "off",
        attention=attention,
        weights=weights,
    )
    model = ModelRequest(str(path), "bfloat16", config)
    client = get_pool(config)
    started = time.perf_counter()
    client.load(model)
    load_seconds = time.perf_counter() - started
    given = inputs(size)
    conditioning = {name: given[name] for name in ("context", "y", "guidance")}
    request = LoopRequest(
        "euler", torch.linspace(1, 0, steps + 1), given["x"], (Branch(conditioning, 0),), 1.0, seed=0, preview=True
    )
    started = time.perf_counter()
    client.sample(model, request)
    warm_seconds = time.perf_counter() - started
    warm = client.details
    times: list[float] = [time.perf_counter()]
    latent = client.sample(model, request, on_progress=lambda *_: times.append(time.perf_counter()))
    times.append(time.perf_counter())
    row = {
        "engine": f"Parallel DiT, {ranks} GPU{'s' * (ranks > 1)}{', compiled' * compiled}",
        "size": size,
        "ms_per_step": per_step(times),
        "load_seconds": load_seconds,
        "first_run_seconds": warm_seconds,
        "memory_gib": [warm.memory_bytes / 2**30, warm.used_bytes / 2**30] if warm is not None else [0.0, 0.0],
        "latent": latent,
    }
    if size <= CALLS_UP_TO:
        calls = [time.perf_counter()]
        for sigma in request.sigmas[:-1]:
            client.forward(model, given["x"].bfloat16(), sigma[None], conditioning)
            calls.append(time.perf_counter())
        row["ms_per_call"] = per_step(calls)
    return row


@torch.no_grad()
def run_diffusers(path: Path, compiled: bool, sizes: list[int], steps: int, out: Path) -> None:
    """The same loop with diffusers' own class on one GPU. Runs in a process of its own, to have the GPU to itself."""
    from diffusers.models.attention_dispatch import attention_backend

    from parallel_runtime.loading.checkpoint import open_checkpoint
    from parallel_runtime.networks.diffusers.flux import FLUX

    from .load_transformer import load_transformer

    device = torch.device("cuda")
    checkpoint = open_checkpoint(path)
    transformer: Any = load_transformer(checkpoint, torch.bfloat16, device)
    if compiled:
        transformer.compile_repeated_blocks(fullgraph=True)
    rows = []
    for size in sizes:
        if size > CALLS_UP_TO and not compiled:
            continue
        given, count = inputs(size, "cuda"), steps_at(size, steps)

        def loop(given: dict[str, torch.Tensor] = given, steps: int = count) -> tuple[torch.Tensor, list[float]]:
            x, times = given["x"], [time.perf_counter()]
            sigmas = torch.linspace(1, 0, steps + 1, device=device)
            for i in range(steps):
                arguments = FLUX.adapter.to_transformer(
                    x.bfloat16(), sigmas[i][None], given["context"], checkpoint.config,
                    y=given["y"], guidance=given["guidance"],
                )  # fmt: skip
                with attention_backend("_native_cudnn" if compiled else "native"):
                    velocity = FLUX.adapter.from_transformer(transformer(**arguments, return_dict=False)[0], x)
                x = x + velocity.float() * (sigmas[i + 1] - sigmas[i])
                torch.cuda.synchronize()
                times.append(time.perf_counter())
            return x, times

        loop()
        latent, times = loop()
        name = "diffusers, 1 GPU, " + ("cuDNN attention, blocks compiled" if compiled else "eager, SDPA")
        torch.save(latent.cpu(), out / f"diffusers-{size}-{compiled}.pt")
        rows.append({"engine": name, "size": size, "ms_per_step": per_step(times)})
    (out / f"diffusers-{compiled}.json").write_text(json.dumps(rows))


def difference(latent: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative distance of two latents."""
    return ((latent - reference).norm() / reference.norm()).item()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--sizes", default="1024")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--diffusers", choices=["eager", "compiled"])
    arguments = parser.parse_args()
    path = arguments.scratch / "flux-dev-random.safetensors"
    sizes = [int(size) for size in arguments.sizes.split(",")]
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.diffusers:
        run_diffusers(path, arguments.diffusers == "compiled", sizes, arguments.steps, arguments.out)
        return
    if not path.exists():
        started = time.perf_counter()
        write_random_flux(path)
        torch.cuda.empty_cache()
        print(f"wrote {path} in {time.perf_counter() - started:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    for kind in ("eager", "compiled"):
        again = [sys.executable, "-m", "benchmarks.flux_step", *sys.argv[1:], "--diffusers", kind]
        subprocess.run(again, check=True)
        rows += json.loads((arguments.out / f"diffusers-{kind == 'compiled'}.json").read_text())
    references = {
        size: torch.load(arguments.out / f"diffusers-{size}-{size > CALLS_UP_TO}.pt", weights_only=True)
        for size in sizes
    }
    own: dict[int, torch.Tensor] = {}
    for ranks in [int(count) for count in arguments.ranks.split(",")]:
        for compiled in (False, True):
            for size in sizes:
                if size > CALLS_UP_TO and ranks > 1 and not compiled:
                    continue
                row = run_pool(path, ranks, compiled, size, steps_at(size, arguments.steps), arguments.attention)
                latent = row.pop("latent")
                row["difference"] = difference(latent, references[size])
                row["own_difference"] = difference(latent, own.setdefault(size, latent))
                rows.append(row)
                print(json.dumps(row), flush=True)
                report(rows, arguments.out)
        close_pools()
    for file in arguments.out.glob("diffusers-*"):
        file.unlink()


def report(rows: list[dict[str, Any]], out: Path) -> None:
    """Print the table and keep it with the machine's description."""
    columns = {
        "ms_per_step": ("ms per step in the pool", ".1f"),
        "ms_per_call": ("ms per single call", ".1f"),
        "load_seconds": ("load s", ".1f"),
        "first_run_seconds": ("first run s", ".1f"),
        "difference": ("difference to diffusers", ".4f"),
        "own_difference": ("difference to ours, 1 GPU, eager", ".4f"),
    }
    lines = ["| engine | size | " + " | ".join(title for title, _ in columns.values()) + " |"]
    lines.append("|---" * (len(columns) + 2) + "|")
    for row in rows:
        cells = [format(row[key], form) if key in row else "" for key, (_, form) in columns.items()]
        lines.append("| " + " | ".join([row["engine"], str(row["size"]), *cells]) + " |")
    machine = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}"
    text = f"{machine}\n\n" + "\n".join(lines) + f"\n\n{NOTE}\n"
    (out / "flux_step.md").write_text(text)
    (out / "flux_step.json").write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))
    print(text)


if __name__ == "__main__":
    main()
