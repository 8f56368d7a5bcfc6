"""Wan 2.1 14B size: seconds per step and TFLOP/s per GPU for a video of 832 x 480 with 81 frames, with CFG.

    python -m benchmarks.wan_step --ranks 1,4
    python -m benchmarks.wan_step --ranks 1 --profile    where a step's time goes, besides
    python -m benchmarks.wan_step --ranks 1,2 --tiny     on the CPU, in seconds, to see that it runs

Random bf16 weights, made on every GPU from one seed: no file is written. One step to warm up, which compiles, then
two that are timed, with an Euler sampler around the pool's own `Predictor`. The table is printed; where $OUT names a
folder, wan_step.json is written there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallel_runtime.acceleration.peer_memory import PeerMemory
from parallel_runtime.config import ParallelPlan
from parallel_runtime.denoising.predict import Call, Predictor
from parallel_runtime.mesh.groups import Groups
from parallel_runtime.mesh.mesh import build_mesh, single_rank_mesh
from parallel_runtime.networks.diffusers.parallel_transformer import parallelize
from parallel_runtime.networks.diffusers.wan import PATCH_SIZE, WAN
from parallel_runtime.requests.conditioning import Conditioning

from .kernel_times import profile

WARM_STEPS, TIMED_STEPS = 1, 2
CFG, BRANCHES = 5.0, 2
FLOPS_NOTE = """FLOPs by formula, a multiply and an add counted as two: in every block the linear layers of
self-attention, cross-attention and feed-forward, both matrix products of self-attention over all video tokens, and
those of cross-attention; times blocks and the two CFG branches. Embeddings, norms, rotary embedding and the output
projection, below 0.1% together, are left out."""


@dataclass(frozen=True)
class Task:
    """A model size and a video; latent sizes are (frames, height, width)."""

    heads: int = 40
    head_dim: int = 128
    layers: int = 40
    ffn: int = 13824
    text_dim: int = 4096
    text: int = 512
    latent: tuple[int, int, int] = (21, 60, 104)
    dtype: torch.dtype = torch.bfloat16

    @property
    def config(self) -> dict[str, Any]:
        """Arguments of WanTransformer3DModel."""
        return {
            "patch_size": PATCH_SIZE,
            "num_attention_heads": self.heads,
            "attention_head_dim": self.head_dim,
            "num_layers": self.layers,
            "ffn_dim": self.ffn,
            "text_dim": self.text_dim,
        }

    @property
    def flops(self) -> float:
        """Floating-point operations of a step, see FLOPS_NOTE."""
        width = self.heads * self.head_dim
        tokens = WAN.adapter.sequence_length((1, 16, *self.latent), (1, self.text, self.text_dim))
        linear = 2 * tokens * width * (4 * width + 2 * width + 2 * self.ffn) + 2 * self.text * width * 2 * width
        attention = 2 * 2 * tokens * (tokens + self.text) * width
        return float(BRANCHES * self.layers * (linear + attention))


FULL = Task()
TINY = Task(4, 32, 2, 256, 48, 9, (3, 10, 14), torch.float32)


def build_transformer(task: Task, device: torch.device) -> torch.nn.Module:
    """Make the transformer on the device, with the weights that a fresh one has: the same on every rank."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    torch.set_default_dtype(task.dtype)
    try:
        with device:
            transformer: Any = WanTransformer3DModel(**task.config)
    finally:
        torch.set_default_dtype(torch.float32)
    return transformer.requires_grad_(False).eval()


def choose_plan(ranks: int, cfg: int | None) -> ParallelPlan:
    """CFG branches apart where the number of ranks allows it, the rest Ulysses."""
    cfg = cfg or (2 if ranks % 2 == 0 else 1)
    return ParallelPlan(cfg=cfg, ulysses=ranks // cfg)


def inputs(task: Task, device: torch.device) -> tuple[torch.Tensor, list[Conditioning]]:
    """Return noise and the texts of both branches, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 16, *task.latent, generator=generator).to(device)
    texts = [torch.randn(1, task.text, task.text_dim, generator=generator) for _ in range(BRANCHES)]
    return x, [Conditioning({"context": text.to(device, task.dtype)}) for text in texts]


def evaluate(
    predictor: Predictor, task: Task, x: torch.Tensor, branches: list[Conditioning], sigma: float
) -> list[torch.Tensor]:
    """Return the predictions of all branches."""
    timestep = torch.tensor([1000 * sigma], device=x.device)
    return predictor([Call(x.to(task.dtype), timestep, text) for text in branches])


def sample(predictor: Predictor, task: Task, device: torch.device) -> tuple[torch.Tensor, list[float]]:
    """Return the latent after all steps, and when each began and the last ended."""
    x, branches = inputs(task, device)
    steps = WARM_STEPS + TIMED_STEPS
    sigmas = torch.linspace(1, 0.5, steps + 1).tolist()
    times = []
    for sigma, sigma_next in itertools.pairwise(sigmas):
        times.append(_now(device))
        cond, uncond = (v.float() for v in evaluate(predictor, task, x, branches, sigma))
        x = x + (uncond + CFG * (cond - uncond)) * (sigma_next - sigma)
    return x, [*times, _now(device)]


def print_profile(predictor: Predictor, task: Task, device: torch.device, tell: bool) -> None:
    """Profile one more step; every rank takes it, as ranks wait for each other, and those that `tell` print."""
    x, branches = inputs(task, device)
    found = profile(lambda: evaluate(predictor, task, x, branches, 0.9), repeats=1)
    if not tell:
        return
    print(f"\nOne step on rank 0: busy for {found['busy']:.1f} ms, {found['launches']:.0f} kernels; ms by kind:")
    for kind, ms in sorted(found["kinds"].items(), key=lambda item: -item[1]):
        print(f"   {kind:28s} {ms:9.1f}")
    for name, count, mean, total in found["longest"][:15]:
        print(f"   {count:6.0f} x {mean:9.1f} us = {total:9.1f} ms  {name}")


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(task: Task, arguments: argparse.Namespace) -> None:
    """One rank of one measurement, started by torchrun; rank 0 leaves a row and the latent in the folder."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu" if arguments.tiny else f"cuda:{os.environ['LOCAL_RANK']}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    mesh = single_rank_mesh()
    if ranks > 1:
        dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
        planned = build_mesh(choose_plan(ranks, arguments.cfg), rank, ranks, groups=Groups(rank, ranks, PeerMemory))
        assert planned is not None, "the plan uses every rank"
        mesh = planned
    transformer = parallelize(
        build_transformer(task, device),
        WAN,
        mesh,
        attention=arguments.attention,
        compile=not arguments.eager,
        # A launch of kernels costs nothing beside steps of seconds, and the third call would be the recording.
        record=False,
    )
    predictor = Predictor(transformer, mesh)
    with torch.no_grad():
        latent, times = sample(predictor, task, device)
        if arguments.profile:
            print_profile(predictor, task, device, tell=rank == 0)
    if rank == 0:
        seconds = (times[-1] - times[WARM_STEPS]) / TIMED_STEPS
        row = {
            "ranks": ranks,
            "plan": str(mesh.plan),
            "attention": transformer.attention,
            "compiled": not arguments.eager,
            "seconds_per_step": seconds,
            "tflops_per_gpu": task.flops / seconds / ranks / 1e12,
            "first_step_seconds": times[WARM_STEPS] - times[0],
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
        }
        (arguments.folder / "row.json").write_text(json.dumps(row))
        torch.save(latent.cpu(), arguments.folder / f"{ranks}.pt")
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def launch(ranks: int, folder: Path) -> dict[str, Any]:
    """Measure on that many ranks, in fresh processes; return the row."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    script = ["-m", "benchmarks.wan_step", *sys.argv[1:], "--folder", str(folder)]
    subprocess.run([*torchrun, *script], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return json.loads((folder / "row.json").read_text())


def complete(rows: list[dict[str, Any]], folder: Path) -> None:
    """Add what compares a row with the first: scaling efficiency, relative distance of the latents."""
    first, reference = rows[0], torch.load(folder / f"{rows[0]['ranks']}.pt", weights_only=True)
    for row in rows:
        ideal = first["seconds_per_step"] * first["ranks"] / row["ranks"]
        row["efficiency"] = ideal / row["seconds_per_step"]
        latent = torch.load(folder / f"{row['ranks']}.pt", weights_only=True)
        row["difference"] = float((latent - reference).norm() / reference.norm())


def report(task: Task, rows: list[dict[str, Any]], tiny: bool) -> None:
    """Print the table; write it with the machine's description where $OUT says."""
    device = "CPU" if tiny else f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    machine = f"{device}, torch {torch.__version__}"
    print(f"\n{machine}; {task}; {task.flops / 1e12:.3g} TFLOP per step\n")
    print("| GPUs | plan | attention | s per step | TFLOP/s per GPU | efficiency | difference | peak GiB |")
    print("|---" * 8 + "|")
    for row in rows:
        peak = "" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
        print(
            f"| {row['ranks']} | {row['plan']} | {row['attention']} | {row['seconds_per_step']:.3f} | "
            f"{row['tflops_per_gpu']:.4g} | {row['efficiency']:.1%} | {row['difference']:.2e} | {peak} |"
        )
    print(f"\n{FLOPS_NOTE}")
    if out := os.environ.get("OUT"):
        content = {"machine": machine, "task": str(task), "flops_per_step": task.flops, "rows": rows}
        Path(out, "wan_step.json").write_text(json.dumps(content, indent=1))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1")
    parser.add_argument("--cfg", type=int, choices=[1, 2], help="ranks for the CFG branches; by default 2 if it fits")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--profile", action="store_true", help="print ms by kind of kernel of one more step, on GPUs")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.profile and arguments.tiny:
        parser.error("--profile tells of a GPU's kernels, and --tiny runs on the CPU.")
    task = TINY if arguments.tiny else FULL
    if arguments.folder is not None:
        measure(task, arguments)
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for ranks in map(int, arguments.ranks.split(",")):
            rows.append(launch(ranks, Path(name)))
            complete(rows, Path(name))
            report(task, rows, arguments.tiny)


if __name__ == "__main__":
    main()
