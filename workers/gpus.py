"""The GPUs of a pool as this process sees them through torch, without taking memory on any."""

from __future__ import annotations

import torch

from parallel_runtime.planning.facts import MachineFacts

from .launch import PoolSpec
from .speeds import guess_link, recall, remember_facts


def find_machine(spec: PoolSpec) -> MachineFacts:
    """Return what plans of this pool reckon with. Of other hosts, GPUs like this one's are expected."""
    if spec.device_type == "cpu":
        return recall(spec, (), 0, guess_link("", False))
    properties = [torch.cuda.get_device_properties(index) for index in spec.devices]
    reached = all(
        torch.cuda.can_device_access_peer(one, other) for one in spec.devices for other in spec.devices if one != other
    )
    gpus = tuple(gpu.name for gpu in properties)
    return recall(spec, gpus, min(gpu.total_memory for gpu in properties), guess_link(gpus[0], reached))


def remember(spec: PoolSpec, facts: MachineFacts) -> None:
    """Keep what the ranks measured."""
    if spec.device_type == "cpu":
        return
    gpus = tuple(torch.cuda.get_device_properties(index).name for index in spec.devices)
    remember_facts(spec, gpus, facts)
