"""Whose memory is taken on each GPU: the pool's, ComfyUI's, that of others. Asked of the driver, by process."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any


def share_out(
    used: int, by_process: Mapping[int, int], pool_pids: Collection[int], own_pid: int, known: tuple[int, int]
) -> dict[str, int]:
    """Whose the used bytes of a GPU are: `pool`, `comfyui`, and `others`, what the driver needs itself included.

    `exact` where the driver knows these processes. In a container it often does not; then pool and ComfyUI are what
    they know of themselves, and the rest counts as others'.

    Args:
        by_process: process -> bytes on this GPU, as the driver has it.
        pool_pids: all processes of our pools.
        own_pid: ComfyUI's.
        known: bytes of the pool and of ComfyUI as they know it themselves.
    """
    exact = own_pid in by_process or any(pid in by_process for pid in pool_pids)
    if exact:
        pool = sum(size for pid, size in by_process.items() if pid in pool_pids)
        comfyui = by_process.get(own_pid, 0)
    else:
        pool, comfyui = known
    pool = min(pool, used)
    comfyui = min(comfyui, used - pool)
    return {"pool": pool, "comfyui": comfyui, "others": used - pool - comfyui, "exact": exact}


def read_gpus(pool_pids: Collection[int], held: Mapping[int, int]) -> list[dict[str, Any]]:
    """Every GPU that ComfyUI sees, `index` as CUDA, and so ComfyUI, counts, and in bytes its `total` and `share_out`.

    Args:
        held: GPU -> bytes of weights that a pool's rank has there.
    """
    import torch

    from workers.driver import list_gpus, processes_by_gpu

    if not torch.cuda.is_available():
        return []
    driver = {gpu.uuid: gpu for gpu in list_gpus()}
    processes = processes_by_gpu()
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        uuid = str(getattr(properties, "uuid", ""))
        known = (held.get(index, 0), torch.cuda.memory_reserved(index))
        used = driver[uuid].memory_used if uuid in driver else sum(known)
        shares = share_out(used, processes.get(uuid, {}), pool_pids, os.getpid(), known)
        found.append({"index": index, "name": properties.name, "total": properties.total_memory, **shares})
    return found
