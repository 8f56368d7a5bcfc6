"""The ranks of benchmarks/host_step_profile.py: their GPUs, what these give, and the mesh of all."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from parallel_runtime.config import ParallelPlan
from parallel_runtime.engine.measure import measure_machine
from parallel_runtime.exchange.head_routes import HeadRoutes
from parallel_runtime.mesh.mesh import Groups, Mesh, build_mesh, single_rank_mesh
from parallel_runtime.networks.comfyui.comfy_code import use_comfyui
from parallel_runtime.requests.facts import CPU, MachineFacts, known_gpu
from workers.machine_facts import guess_link

from . import alone
from .in_comfyui.families import Family
from .in_comfyui.host_families import HOST_REAL, host_tiny


def start(options: argparse.Namespace) -> tuple[torch.device, Mapping[str, Family], Mesh]:
    """This rank's device, the models by name, and the mesh of all ranks, by `comfyui`, `tiny` and `alone`."""
    options.comfyui = options.comfyui.expanduser()
    if options.alone:
        alone.begin(options.alone)
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    families = host_tiny() if options.tiny else HOST_REAL  # before ComfyUI, which has a package `tests`, too
    use_comfyui(str(options.comfyui), {"cpu": device.type == "cpu"})
    mesh: Mesh | None = single_rank_mesh()
    if world_size > 1:
        on_gpu = device.type == "cuda"
        backend, own = ("cpu:gloo,cuda:nccl", device) if on_gpu else ("gloo", None)
        if not options.alone:
            dist.init_process_group(backend, device_id=own, timeout=timedelta(seconds=120))
        groups = Groups(rank, world_size, HeadRoutes)
        mesh = build_mesh(ParallelPlan(ulysses=world_size), rank, world_size, groups=groups)
    assert mesh is not None
    return device, families, mesh


def measured(device: torch.device, world_size: int) -> MachineFacts:
    """What the ranks run on, as a pool measures it when it loads its first model. Collective over all ranks."""
    if device.type == "cpu":
        return CPU
    used = range(min(world_size, torch.cuda.device_count()))  # one is all that there is where it is alone
    gpus = [torch.cuda.get_device_properties(index) for index in used]
    reached = all(torch.cuda.can_device_access_peer(0, other) for other in used[1:])
    assumed = known_gpu(gpus[0].name, gpus[0].total_memory, guess_link(gpus, reached))
    return measure_machine(assumed, device, world_size)


def finish() -> None:
    """Leave the world of several ranks."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
