"""What plans reckon with on this machine: measured once, kept in the state directory, constants until then.

Numbers are of GPUs by their UUIDs: which GPU is number 0 changes with CUDA_VISIBLE_DEVICES, and with the machine where
the state directory is on a network. The ranks of a pool measure when a model is first loaded; here torch is asked
which GPUs they are, without taking memory on any."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import msgspec
import psutil
import torch

from parallel_runtime import measured
from parallel_runtime.gpu_memory.nvlink import joined_by_nvlink
from parallel_runtime.requests.facts import CPU, ETHERNET, HOST_MEMORY, NVLINK, PCIE, LinkFacts, MachineFacts, known_gpu
from parallel_runtime.switches import is_on

from .launch import PoolSpec
from .state_folder import state_directory

_USABLE = 0.92
"""Share of a GPU's memory that a rank may plan with; the rest is the display's, the driver's and fragmentation."""
_FLOAT8 = 8, 9  # compute capability of the first GPUs that multiply in float8
_OF_HOST = 0.6  # share of the host's memory that weights may take; the rest is for ComfyUI and its other models


def find_machine(spec: PoolSpec) -> MachineFacts:
    """What plans of this pool reckon with. Of other hosts, GPUs like this one's are expected."""
    if spec.device_type == "cpu":
        return CPU
    reach, gpus = torch.cuda.can_device_access_peer, _properties(spec)
    reached = all(reach(one, other) for one, other in itertools.permutations(spec.devices, 2))
    known = recall(spec, gpus, guess_link(gpus, reached))
    float8 = all((gpu.major, gpu.minor) >= _FLOAT8 for gpu in gpus)
    return replace(known, float8=float8, host_bytes=int(psutil.virtual_memory().total * _OF_HOST))


def remember(spec: PoolSpec, facts: MachineFacts) -> None:
    """Keep what the ranks measured for later pools on the same devices."""
    if spec.device_type != "cpu":
        measured.keep(state_directory() / "measured", _key(spec, _properties(spec), facts.link), asdict(facts))


def guess_link(gpus: Sequence[Any], peer_access: bool) -> LinkFacts:
    """The constants of a link, by the GPUs, torch's properties of each, and whether they reach each other's memory."""
    if not peer_access or os.environ.get("NCCL_P2P_DISABLE") == "1":
        return HOST_MEMORY
    return NVLINK if joined_by_nvlink(gpus) else PCIE


def recall(spec: PoolSpec, gpus: Sequence[Any], link: LinkFacts) -> MachineFacts:
    """What is known of these GPUs, torch's properties of each: measured numbers, else those of the first and `link`."""
    smallest = min(gpu.total_memory for gpu in gpus)
    assumed = known_gpu(gpus[0].name, int(smallest * _USABLE), link)
    if spec.hosts > 1:
        assumed = replace(assumed, network=ETHERNET, ranks_per_host=len(spec.devices))
    kept = measured.recall(state_directory() / "measured", _key(spec, gpus, link))
    with contextlib.suppress(KeyError, TypeError, msgspec.ValidationError):  # nothing, or what another version wrote
        if "host_rate" in kept and "route" in kept["link"]:  # which were not measured once
            # With today's memory. (The ranks know speeds when they have started.)
            return replace(msgspec.convert(kept, MachineFacts), memory_bytes=assumed.memory_bytes, speeds=())
    return assumed


def _properties(spec: PoolSpec) -> list[Any]:
    """Of each rank's GPU, as torch tells them."""
    return [torch.cuda.get_device_properties(index) for index in spec.devices]


def _key(spec: PoolSpec, gpus: Sequence[Any], link: LinkFacts) -> str:
    """Everything that the numbers depend on; which rank has which of the GPUs is not. Older torch tells no UUID."""
    which = ", ".join(sorted(f"{gpu.name} {getattr(gpu, 'uuid', '')}" for gpu in gpus))
    reach = ("no P2P" if is_on("host") else "no P2P, NCCL alone") if link.name == HOST_MEMORY.name else "P2P"
    return f"ranks | {spec.hosts} hosts of {which} | {reach} | {measured.software()}"
