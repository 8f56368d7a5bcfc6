"""The GPUs of a pool as this process sees them through torch, without taking memory on any."""

from __future__ import annotations

from dataclasses import replace

import psutil
import torch

from parallel_runtime.requests.facts import MachineFacts

from .launch import PoolSpec
from .machine_facts import GpuId, guess_link, recall, remember_facts

_OF_HOST = 0.6
"""Share of the host's memory that weights may take; the rest is for ComfyUI and its other models."""


def find_machine(spec: PoolSpec) -> MachineFacts:
    """Return what plans of this pool reckon with. Of other hosts, GPUs like this one's are expected."""
    if spec.device_type == "cpu":
        return recall(spec, (), 0, guess_link("", False))
    properties = [torch.cuda.get_device_properties(index) for index in spec.devices]
    reached = all(
        torch.cuda.can_device_access_peer(one, other) for one in spec.devices for other in spec.devices if one != other
    )
    smallest = min(gpu.total_memory for gpu in properties)
    known = recall(spec, _identify(spec), smallest, guess_link(properties[0].name, reached))
    return replace(known, host_bytes=int(psutil.virtual_memory().total * _OF_HOST))


def remember(spec: PoolSpec, facts: MachineFacts) -> None:
    """Keep what the ranks measured."""
    if spec.device_type != "cpu":
        remember_facts(spec, _identify(spec), facts)


def _identify(spec: PoolSpec) -> tuple[GpuId, ...]:
    properties = [torch.cuda.get_device_properties(index) for index in spec.devices]
    return tuple(GpuId(gpu.name, str(getattr(gpu, "uuid", ""))) for gpu in properties)
