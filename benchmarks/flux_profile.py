"""Where one FLUX.1-dev forward spends its time: kernels by kind, and the gaps between them.

    python -m benchmarks.flux_profile --sizes 1024 --variants base,graph
    torchrun --nproc-per-node 2 -m benchmarks.flux_profile --sizes 1024,2048

Random weights made on the GPU, no checkpoint file. A variant is a `+`-joined list of switches: `base` (compiled),
`eager`, `graph` (a CUDA graph taken here), `record` (taken by the wrapper), `nccl` (no peer memory), `cd` and `mat`
(inductor's coordinate descent and GEMM autotuning), `overlap` (inductor's overlap of collectives and compute), `loops`
(norms read their rows in loops, as torch.compile does by itself, without acceleration/reductions.py).
"""

# mypy: disable-error-code="assignment, attr-defined, misc, operator, var-annotated, index, arg-type"

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._inductor.choices import InductorChoices

from parallel_runtime.acceleration import reductions
from parallel_runtime.acceleration.peer_memory import PeerMemory
from parallel_runtime.config import ParallelPlan
from parallel_runtime.mesh.groups import Groups
from parallel_runtime.mesh.mesh import Mesh, build_mesh, single_rank_mesh
from parallel_runtime.networks.diffusers.flux import FLUX
from parallel_runtime.networks.diffusers.parallel_transformer import parallelize

from .flux_checkpoint import FLUX_DEV
from .flux_step import inputs
from .kernel_times import milliseconds, profile


def build(device: torch.device) -> Any:
    """Return a FluxTransformer2DModel of FLUX.1-dev size, the same random bf16 weights on every rank."""
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with device:
        transformer: Any = FluxTransformer2DModel(**FLUX_DEV)
    torch.set_default_dtype(torch.float32)
    return transformer.requires_grad_(False).eval()


def arguments(size: int, device: torch.device) -> dict[str, Any]:
    """Return the transformer's arguments for a square picture."""
    given = {name: value.to(device) for name, value in inputs(size).items()}
    return FLUX.adapter.to_transformer(
        given["x"].bfloat16(), torch.tensor([0.7], device=device), given["context"], FLUX_DEV,
        y=given["y"], guidance=given["guidance"],
    )  # fmt: skip


def run(wrapped: Any, given: dict[str, Any]) -> torch.Tensor:
    """Return one forward's output."""
    return wrapped(**given, return_dict=False)[0]


def micro(device: torch.device) -> None:
    """Print rates of the products and of attention at the shapes of 1, 2 and 4 ranks."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def rate(call: Callable[[], Any], flops: float) -> str:
        for _ in range(3):
            call()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(20):
            call()
        end.record()
        end.synchronize()
        elapsed = start.elapsed_time(end) / 20
        return f"{elapsed * 1000:7.1f} us {flops / elapsed / 1e9:6.0f} TF/s"

    for rows in (4608, 4096, 512, 2304, 2048, 256, 1152, 1024, 128):
        for width, out in ((3072, 3072), (3072, 9216), (3072, 12288), (3072, 21504), (12288, 3072), (15360, 3072)):
            x = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
            weight = torch.randn(out, width, device=device, dtype=torch.bfloat16)
            bias = torch.randn(out, device=device, dtype=torch.bfloat16)
            flops = 2.0 * rows * width * out
            plain = rate(lambda x=x, w=weight: torch.mm(x, w.t()), flops)
            biased = rate(lambda x=x, w=weight, b=bias: torch.addmm(b, x, w.t()), flops)
            print(f"mm {rows}x{width}x{out}: {plain} | addmm {biased}")
    for heads in (24, 12, 6):
        packed = torch.randn(4608, 3, heads, 128, device=device, dtype=torch.bfloat16)
        strided = [part.unsqueeze(0).transpose(1, 2) for part in packed.unbind(1)]
        dense = [part.contiguous() for part in strided]
        bshd = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in strided]
        for name, given in (("strided", strided), ("BHSD", dense), ("BSHD", bshd)):
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                out = torch.nn.functional.scaled_dot_product_attention(*given)
                speed = rate(
                    lambda g=given: torch.nn.functional.scaled_dot_product_attention(*g), 4.0 * 4608**2 * heads * 128
                )
            print(f"attention {heads} heads {name}: {speed} out strides {out.stride()}")


def variant(name: str, transformer: Any, mesh: Mesh, sizes: list[int], device: torch.device) -> dict[str, Any]:
    """Compile, time and profile one variant."""
    switches = set(name.split("+"))
    torch._dynamo.reset()
    patches = {}
    if "cd" in switches:
        patches["coordinate_descent_tuning"] = True
    if "mat" in switches:
        patches["max_autotune_gemm"] = True
        patches["max_autotune_gemm_backends"] = "ATEN,TRITON"
    if "overlap" in switches:
        patches["reorder_for_compute_comm_overlap"] = True
        patches["reorder_for_compute_comm_overlap_passes"] = [
            "reorder_compute_for_overlap",
            "sink_waits",
            "raise_comms",
        ]
    choices: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if "loops" in switches:
        choices = mock.patch.object(reductions, "RowsAtOnce", InductorChoices)
        patches["force_disable_caches"] = True  # the key of the cache on disk does not tell who chose
    row: dict[str, Any] = {"variant": name}
    with torch._inductor.config.patch(patches), choices:
        wrapped = parallelize(
            transformer,
            FLUX,
            mesh,
            compile="eager" not in switches,
            record="record" in switches,
            share="nccl" not in switches,
        )
        for size in sizes:
            given = arguments(size, device)
            call: Callable[[], Any] = functools.partial(run, wrapped, given)
            started = time.perf_counter()
            call()
            torch.cuda.synchronize()
            row[f"compile s {size}"] = time.perf_counter() - started
            for _ in range(3):
                result = call().float()
            if "graph" in switches:
                graph = torch.cuda.CUDAGraph()
                started = time.perf_counter()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    output = call()
                row[f"capture s {size}"] = time.perf_counter() - started
                graph.replay()
                row[f"graph error {size}"] = (output.float() - result).norm().item() / result.norm().item()
                call = graph.replay
            row[f"ms {size}"] = milliseconds(call)
            if dist.get_rank() == 0 if dist.is_initialized() else True:
                report = profile(call)
                row[f"profile {size}"] = report
                print(
                    f"== {name} {size}: {row[f'ms {size}']:.2f} ms, busy {report['busy']:.2f}, "
                    f"{report['launches']:.0f} launches, first {row[f'compile s {size}']:.1f} s",
                    flush=True,
                )
                for kind, ms in sorted(report["kinds"].items(), key=lambda item: -item[1]):
                    print(f"   {kind:28s} {ms:7.2f}")
            else:
                for _ in range(3):
                    call()
                    torch.cuda.synchronize()
            row[f"output {size}"] = result.cpu()
    wrapped.unwrap()
    return row


@torch.no_grad()
def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="1024")
    parser.add_argument("--variants", default="base")
    parser.add_argument("--micro", action="store_true")
    parser.add_argument("--top", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    mesh: Mesh | None = single_rank_mesh()
    if world_size > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, timeout=timedelta(seconds=120))
        groups = Groups(rank, world_size, PeerMemory)
        mesh = build_mesh(ParallelPlan(ulysses=world_size), rank, world_size, groups=groups)
    assert mesh is not None
    if options.micro and rank == 0:
        micro(device)
    transformer = build(device)
    rows, sizes = [], [int(size) for size in options.sizes.split(",")]
    for name in options.variants.split(","):
        row = variant(name, transformer, mesh, sizes, device)
        for size in sizes:
            output = row.pop(f"output {size}")
            first = rows[0][f"reference {size}"] if rows else output
            row[f"reference {size}"] = output
            row[f"difference {size}"] = ((output - first).norm() / first.norm()).item()
        rows.append(row)
        if rank == 0:
            for size in sizes:
                for line in row[f"profile {size}"]["longest"][: options.top]:
                    print("   {1:6.1f} x {2:8.1f} us = {3:7.2f} ms  {0}".format(*line))
    if rank == 0:
        print(f"{world_size} GPUs")
        for row in rows:
            print(
                {
                    key: value if isinstance(value, str) else round(value, 4)
                    for key, value in row.items()
                    if not key.startswith(("profile", "reference"))
                }
            )
        if options.out:
            kept = [{k: v for k, v in row.items() if not k.startswith("reference")} for row in rows]
            (options.out / f"profile-{world_size}.json").write_text(json.dumps(kept, indent=1))
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
