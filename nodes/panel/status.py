"""All pools of this ComfyUI as plain data, and as a text for bug reports. Waits for no job, and says nothing secret."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from parallel_runtime.comfyui_contracts import host_notes
from parallel_runtime.errors import ParallelError
from parallel_runtime.measured import find_version
from workers.state_folder import read_tail

from .run_history import HISTORY

if TYPE_CHECKING:
    from workers.client.client import PoolClient
    from workers.client.node_requests import VaeRequest
    from workers.wire.protocol import Status

VERSION = 1  # of the answer's form; a field may be added without another number
ANSWER_SECONDS = 1.0
_PACKAGES = ("torch", "safetensors", "msgspec", "nvidia-ml-py", "comfyui-frontend-package")
_LINES = 60  # of each log in a bug report
_SECRETS = (
    re.compile(r"(?i)\b([\w-]*(?:secret|token(?!s)|password|passwd|api[_-]?key)[\w-]*[\"']?\s*[=:]\s*[\"']?)[^\s\"']+"),
    re.compile(r"(?i)\b((?:bearer|basic)\s+)[\w.~+/=-]{8,}"),
    re.compile(r"(://[^\s/:@]*:)[^\s/@]+(?=@)"),  # of an address
    re.compile(r"\b(hf_|sk-|ghp_|github_pat_)[\w-]{16,}"),  # what such keys begin with, whatever stands before
)


def read_status() -> dict[str, Any]:
    """The whole answer; see docs/api.md. Asks each pool's supervisor, so it takes a moment."""
    from workers.client.pool_registry import known_pools

    pools = known_pools()
    processes = [_processes(pool) for pool in pools]
    held = {device: _held(pool) for pool in pools if pool.spec.device_type == "cuda" for device in pool.spec.devices}
    memory, own = psutil.virtual_memory(), psutil.Process().memory_info()
    return {
        "version": VERSION,
        "pools": list(map(_pool, pools, processes)),
        "gpus": read_gpus({pid for several in processes for pid in several}, held),
        "host": {"total": memory.total, "available": memory.available, "comfyui": own.rss},
        "notes": [note.to_data() for note in host_notes()],
        **HISTORY.to_mapping(),
    }


def write_diagnostics() -> str:
    """For bug reports: versions, state, ends of the logs."""
    from workers.client.pool_registry import known_pools

    lines = ["Parallel DiT diagnostics", f"Python {platform.python_version()}, {platform.platform()}"]
    lines += [f"{name} {find_version(name) or 'is missing'}" for name in _PACKAGES]
    status = read_status()
    for run in status["runs"][:3]:
        lines.append(f"ran: {run['model']}, latent {run['latent']}, {run['plan']} {run['step_seconds']} s per step")
    lines += ["", json.dumps({**status, "runs": [], "timeline": []}, indent=1)]
    for pool in known_pools():
        if pool.pool is not None:
            lines += ["", f"last lines of {pool.pool.log.name}:", *read_tail(pool.pool.log).splitlines()[-_LINES:]]
    return clean("\n".join(lines))


def _processes(pool: PoolClient) -> dict[int, int]:
    """Of a pool that runs, its supervisor and all below it: process -> bytes on the host."""
    running, found = pool.pool, {}
    if running is None or not running.life.alive:
        return {}
    with contextlib.suppress(psutil.Error):
        supervisor = psutil.Process(running.pid)
        for process in (supervisor, *supervisor.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it ended meanwhile
                found[process.pid] = process.memory_info().rss
    return found


def _held(pool: PoolClient) -> int:
    models = sum(pool.held_bytes(model) for model, _ in pool.models)
    return models + sum(map(pool.held_bytes, pool.vaes))


def _pool(pool: PoolClient, processes: Mapping[int, int]) -> dict[str, Any]:
    running, wait = pool.pool, pool.keeper.waits_for
    status: Status | None = None
    with contextlib.suppress(ParallelError):  # it died at this moment
        status = pool.status(ANSWER_SECONDS)
    death = running.death() if running is not None and not running.life.alive else None
    state = status.state if status is not None else "off" if death is None else "dead"
    works = state not in ("off", "dead", "idle")
    pids, devices = (status.pids, status.devices) if status is not None else ({}, {})
    return {
        "name": str(pool.spec),
        "kind": pool.spec.device_type,
        "devices": list(pool.spec.devices),
        "hosts": pool.spec.hosts,
        "state": state,
        "idle_seconds": int(pool.keeper.idle_seconds),
        "doing": {"what": wait.reason, "done": wait.done, "total": wait.total} if works else None,
        "error": clean(str(death)) if death is not None else None,
        "error_said": _cleaned(death.said.to_data()) if death is not None else None,
        "ranks": [{"rank": rank, "pid": pid, "device": devices.get(rank)} for rank, pid in sorted(pids.items())],
        "host_bytes": sum(processes.values()),
        "models": [*_models(pool), *(_vae(vae, pool.held_bytes(vae)) for vae in pool.vaes)],
        "plan": pool.ran.plan if pool.ran is not None else "",
        "plan_said": pool.ran.plan.to_data() if pool.ran is not None else None,
        "details": msgspec.to_builtins(pool.details),
        "log": running.log.name if running is not None else None,
    }


def clean(text: str) -> str:
    """The text for others to read: with ~ for the home folder and *** for the values of secrets."""
    text = text.replace(str(Path.home()), "~")
    for secret in _SECRETS:
        text = secret.sub(r"\1***", text)
    return text


def _cleaned(data: Any) -> Any:
    if isinstance(data, str):
        return clean(data)
    if isinstance(data, dict):
        return {name: _cleaned(value) for name, value in data.items()}
    return [_cleaned(value) for value in data]


def _models(pool: PoolClient) -> list[dict[str, Any]]:
    """Each file once: several configurations of it have the same weights."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for request, loaded in pool.models:
        key = name, dtype = Path(request.path).name, request.dtype
        held = pool.held_bytes(request)
        if key not in found or held:
            found[key] = {
                "name": name,
                "family": loaded.family,
                "dtype": dtype,
                "state": "resident" if held else "parked",
                "bytes_per_rank": held or loaded.bytes_per_rank,
                "foreseen": loaded.explanation,
                "details": msgspec.to_builtins(loaded.details),
            }
    return list(found.values())


def _vae(vae: VaeRequest, size: int) -> dict[str, Any]:
    named = {"name": Path(vae.file.path).name, "family": "VAE", "dtype": vae.file.dtype}
    return {**named, "state": "resident", "bytes_per_rank": size, "foreseen": "", "details": None}


def read_gpus(pool_pids: Collection[int], held: Mapping[int, int]) -> list[dict[str, Any]]:
    """Every GPU by CUDA's index, and its `share_out`, in bytes; `held` are those of a rank's weights on each."""
    import torch

    from workers.driver import list_gpus, processes_by_gpu

    if not torch.cuda.is_available():
        return []
    driver, processes, found = {gpu.uuid: gpu for gpu in list_gpus()}, processes_by_gpu(), []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        uuid = str(getattr(properties, "uuid", ""))
        known = (held.get(index, 0), torch.cuda.memory_reserved(index))
        used = driver[uuid].memory_used if uuid in driver else sum(known)
        shares = share_out(used, processes.get(uuid, {}), pool_pids, os.getpid(), known)
        found.append({"index": index, "name": properties.name, "total": properties.total_memory, **shares})
    return found


def share_out(
    used: int, by_process: Mapping[int, int], pool_pids: Collection[int], own_pid: int, known: tuple[int, int]
) -> dict[str, int]:
    """Whose the used bytes of a GPU are; what the driver needs itself counts as others'. `exact` by the driver's bytes
    of each process; in a container it often has none of these, and `known` is what pool and ComfyUI know themselves."""
    exact = own_pid in by_process or any(pid in by_process for pid in pool_pids)
    if exact:
        known = (sum(size for pid, size in by_process.items() if pid in pool_pids), by_process.get(own_pid, 0))
    pool = min(known[0], used)
    comfyui = min(known[1], used - pool)
    return {"pool": pool, "comfyui": comfyui, "others": used - pool - comfyui, "exact": exact}
