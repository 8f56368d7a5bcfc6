"""PipeFusion beside Ulysses and ring on a FLUX.1-dev sized transformer: ms per step, s per picture, memory per rank.

    torchrun --nproc-per-node 4 -m benchmarks.pipefusion_step --plans "ulysses=4;pipe=4,patches=4"
    NCCL_P2P_DISABLE=1 torchrun --nproc-per-node 4 -m benchmarks.pipefusion_step      # stands for GPUs on PCIe
    torchrun --nproc-per-node 2 -m benchmarks.pipefusion_step --tiny --plans "pipe=2,patches=2"      # on CPUs

Random bf16 weights made on the device, the loop that the pool's ranks run, latents compared with the first plan's.
A plan that is started after `--seconds` is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import FluxTransformer2DModel

from parallel_runtime.acceleration.peer_memory import PeerMemory
from parallel_runtime.config import ParallelPlan
from parallel_runtime.denoising.denoise import Denoising
from parallel_runtime.denoising.predict import Predictor
from parallel_runtime.engine.plan_meshes import Joined, Meshes
from parallel_runtime.networks.diffusers.flux import FLUX
from parallel_runtime.networks.diffusers.parallel_transformer import ParallelTransformer, parallelize
from parallel_runtime.pipefusion.denoise import PipelineDenoising
from parallel_runtime.pipefusion.runner import StageRunner
from parallel_runtime.requests.conditioning import Conditioning
from parallel_runtime.requests.requests import ConditioningRef, Sample

from .flux_checkpoint import FLUX_DEV
from .lone_stage import stage_of
from .step_control import StepControl

TEXT_TOKENS = 512
PLANS = "ulysses=4;pipe=4,patches=4;pipe=2,ulysses=2,patches=2;ring=4"
TINY = {**FLUX_DEV, "num_layers": 2, "num_single_layers": 2, "num_attention_heads": 2, "joint_attention_dim": 64}


def build(config: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    """Return the transformer, with the same random weights on every rank."""
    torch.manual_seed(0)
    with torch.device("meta"):
        transformer: Any = FluxTransformer2DModel(**config)
    transformer = transformer.to(dtype).to_empty(device=device)
    for name, parameter in transformer.named_parameters():
        parameter.data.normal_(std=0.02 if parameter.ndim > 1 else 0.01)
        if parameter.ndim == 1 and "norm" in name and name.endswith("weight"):
            parameter.data += 1
    return transformer.requires_grad_(False).eval()


def tensors_for(size: int, steps: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Start latent and sigmas of a square picture."""
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(1, 16, size // 8, size // 8, generator=generator).to(device)
    sigmas = torch.linspace(1, 0, steps + 1)
    return {"x": x, "sigmas": sigmas, "timesteps": sigmas.to(device)}


def conditioning_for(config: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Conditioning:
    """Random text of the model's widths."""
    generator = torch.Generator().manual_seed(1)
    context = torch.randn(1, TEXT_TOKENS, config["joint_attention_dim"], generator=generator)
    pooled = torch.randn(1, config["pooled_projection_dim"], generator=generator)
    return Conditioning(
        {
            "context": context.to(device, dtype),
            "y": pooled.to(device, dtype),
            "guidance": torch.full((1,), 3.5, device=device),
        }
    )


def run(
    transformer: ParallelTransformer,
    joined: Joined,
    plan: ParallelPlan,
    denoising: Denoising,
    text: Conditioning,
    tensors: dict[str, torch.Tensor],
) -> tuple[torch.Tensor | None, list[float]]:
    """One picture, and when each step was told of."""
    times: list[float] = []
    control = StepControl(tensors["x"].device, lambda: times.append(time.perf_counter()))
    latent: torch.Tensor | None
    if transformer.stage is None:
        latent = denoising.run(Predictor(transformer, joined.mesh), [text], tensors, control)
    else:
        assert joined.links is not None
        seen = denoising.model_inputs(tensors["x"], tensors)[0]
        runner = StageRunner(transformer, joined.mesh, joined.links, [text], seen, plan.patches, keep=True)
        latent = PipelineDenoising(denoising, runner, plan.warmup_steps, tensors, control).run()
    control.finish()
    return latent, times


def measure(
    plan: ParallelPlan, record: bool, options: argparse.Namespace, meshes: Meshes, device: torch.device
) -> dict[str, Any]:
    """Time one plan at all sizes; collective over the world."""
    dtype = torch.float32 if options.tiny else torch.bfloat16
    config = TINY if options.tiny else FLUX_DEV
    joined = meshes.join(plan)
    assert joined is not None, "the plan uses every rank"
    module = build(config, device, dtype)
    if plan.pipe > 1:
        transformer = stage_of(module, FLUX, joined.mesh, compile=not options.eager)
    else:
        transformer = parallelize(module, FLUX, joined.mesh, compile=not options.eager, record=record)
    text = conditioning_for(config, device, dtype)
    branch = ConditioningRef(0)
    denoising = Denoising(Sample("m", "euler", (branch,), 1.0, seed=0, noise_device=device.type), dtype)
    row: dict[str, Any] = {"plan": str(plan), "graphs": record, "p2p": os.environ.get("NCCL_P2P_DISABLE", "0") != "1"}
    row["weights_gib"] = sum(parameter.nbytes for parameter in transformer.parameters()) / 2**30
    for size in options.sizes:
        started = time.perf_counter()
        short = plan.warmup_steps + 4  # compiled, then recorded at the third step of its kind
        run(transformer, joined, plan, denoising, text, tensors_for(size, short, device))
        _wait(device)
        row[f"first_{size}_s"] = time.perf_counter() - started
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        latent, times = run(transformer, joined, plan, denoising, text, tensors_for(size, options.steps, device))
        _wait(device)
        seconds = time.perf_counter() - started
        later = times[plan.warmup_steps + 1 : -1]
        row[f"picture_{size}_s"] = seconds
        row[f"step_{size}_ms"] = 1000 * seconds / options.steps
        row[f"later_step_{size}_ms"] = 1000 * (later[-1] - later[0]) / (len(later) - 1)
        row[f"peak_{size}_gib"] = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
        row[f"latent_{size}"] = latent
    transformer.unwrap()  # recorded forwards hold communicators, which then could not be destroyed
    return row


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def read_plan(text: str, warmup: int) -> ParallelPlan:
    """Read "pipe=4,patches=4"; what follows as "launched" asks for no CUDA graphs."""
    degrees = {name: int(value) for name, value in (part.split("=") for part in text.split(","))}
    plan = ParallelPlan(**degrees)
    return replace(plan, warmup_steps=warmup) if plan.pipe > 1 else plan


def report(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Print the table, with the latents' relative distance from the first plan's, and write it if asked."""
    first = rows[0]
    for row in rows:
        for size in options.sizes:
            latent, reference = row[f"latent_{size}"], first[f"latent_{size}"]
            row[f"distance_{size}"] = ((latent - reference).norm() / reference.norm()).item()
    told = [{name: value for name, value in row.items() if not name.startswith("latent")} for row in rows]
    for row in told:
        print({name: round(value, 5) if isinstance(value, float) else value for name, value in row.items()}, flush=True)
    if options.out:
        options.out.write_text(json.dumps(told, indent=1))


@torch.no_grad()
def main() -> None:
    """Command line, under torchrun."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", default=PLANS)
    parser.add_argument("--sizes", type=lambda text: [int(size) for size in text.split(",")], default=[1024, 2048])
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="on CPUs, two blocks of each kind, float32")
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    begun = time.perf_counter()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu" if options.tiny else f"cuda:{os.environ['LOCAL_RANK']}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=120))
    meshes = Meshes(rank, world_size, share=PeerMemory)
    rows = []
    for text in options.plans.split(";"):
        late = torch.tensor([time.perf_counter() - begun > options.seconds])
        dist.broadcast(late, src=0)
        if late:
            break
        record = "launched" not in text
        plan = read_plan(text.replace(",launched", ""), options.warmup)
        rows.append(measure(plan, record, options, meshes, device))
        if rank == 0:
            print(
                f"[{time.perf_counter() - begun:.0f} s] ",
                {k: v for k, v in rows[-1].items() if "latent" not in k},
                flush=True,
            )
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if rank == 0:
        report(rows, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
