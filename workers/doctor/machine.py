"""The machine as the doctor finds it: packages, GPUs, links, memory. What needs torch is asked of a process of its own:
`python -m workers.doctor.machine`, JSON on its output, and its GPU memory back."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import psutil

from parallel_runtime.measured import find_version

from ..driver import DriverGpu, find_links, list_gpus
from ..launch import PACK_ROOT
from ..leftovers import die_with_parent, make_folder

OLDEST = {
    "torch": "2.6", "safetensors": "0.4.3", "msgspec": "0.18", "psutil": "5.9", "packaging": "20.0",
    "nvidia-ml-py": "12.535.77",
}  # fmt: skip
"""Oldest version of each package that is supported."""
_PROBE_SECONDS = 120
_SHOWN_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NCCL_P2P", "NCCL_IB", "NCCL_SHM", "NCCL_SOCKET")


@dataclass(frozen=True)
class Link:
    """Between two GPUs. `peer_access`: each reaches the other's memory; `kind`: in words, None unknown."""

    first: int
    second: int
    peer_access: bool
    kind: str | None = None


@dataclass(frozen=True)
class Machine:
    """Facts, without a verdict; memory in bytes. A package whose version is None is missing."""

    packages: dict[str, str | None]
    memory_total: int
    memory_available: int
    shm_free: int
    environment: dict[str, str] = field(default_factory=dict)
    cuda: str | None = None
    nccl: str | None = None
    driver_gpus: tuple[DriverGpu, ...] = ()
    gpus: tuple[DriverGpu, ...] = ()  # those that CUDA sees, in its order and by its numbers
    links: tuple[Link, ...] = ()
    problem: str | None = None  # why the probe said nothing; as below without a full stop
    gpu_problem: str | None = None  # what CUDA complained about


def look() -> Machine:
    """Versions, memory, GPUs as the driver counts them and as CUDA does, and their links."""
    memory, shm, driver_gpus = psutil.virtual_memory(), os.statvfs("/dev/shm"), list_gpus()
    environment = {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_SHOWN_VARIABLES)}
    packages, free = {name: find_version(name) for name in OLDEST}, shm.f_bavail * shm.f_frsize
    told = _probe()
    seen, reach = told.pop("gpus", []), told.pop("reach", [])
    by_uuid = {gpu.uuid: gpu for gpu in driver_gpus}
    # What the driver does not tell of (a part of a GPU) is known by its name alone.
    known = [by_uuid.get(uuid) or DriverGpu(-1, uuid, name, 0, 0, "", "") for uuid, name in seen]
    kinds = find_links() if len(known) > 1 else {}
    pairs = [(first, second) for second in range(len(known)) for first in range(second)]
    links = [Link(a, b, [a, b] in reach, kinds.get((known[a].index, known[b].index))) for a, b in pairs]
    gpus = tuple(replace(gpu, index=index) for index, gpu in enumerate(known))
    told |= {"driver_gpus": driver_gpus, "gpus": gpus, "links": tuple(links)}
    return Machine(packages, memory.total, memory.available, free, environment, **told)


def _probe() -> dict[str, Any]:
    """In a process of its own: a driver that hangs or crashes then takes nobody along."""
    with contextlib.closing(make_folder()) as folder:  # packages make folders for their caches when they are imported
        common: dict[str, Any] = {"cwd": PACK_ROOT, "capture_output": True, "text": True}
        common["env"] = os.environ | {"TMPDIR": str(folder.path)}
        try:
            done = subprocess.run([sys.executable, "-m", "workers.doctor.machine"], **common, timeout=_PROBE_SECONDS)
        except subprocess.TimeoutExpired:
            return {"problem": f"torch did not come up within {_PROBE_SECONDS} seconds; most often a GPU hangs"}
    if done.returncode == 0:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "nothing").strip()
    return {"problem": f"torch could not be asked about the GPUs (exit code {done.returncode}): {last}"}


def see_torch() -> dict[str, Any]:
    """Versions, each GPU's (UUID, name) as CUDA counts, and pairs that reach each other's memory."""
    import torch

    facts: dict[str, Any] = {"cuda": torch.version.cuda}
    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        return facts | {"gpu_problem": str(complaints[0].message).splitlines()[0].rstrip(".") if complaints else None}
    with contextlib.suppress(RuntimeError, AttributeError, ImportError):  # a build without NCCL
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    reach = torch.cuda.can_device_access_peer
    pairs = [(one, other) for other in range(len(gpus)) for one in range(other)]
    facts["gpus"] = [(str(gpu.uuid), gpu.name) for gpu in gpus]
    facts["reach"] = [pair for pair in pairs if reach(*pair) and reach(*pair[::-1])]
    return facts


if __name__ == "__main__":
    die_with_parent(os.getppid())
    with contextlib.redirect_stdout(sys.stderr):  # whatever packages print while they are imported
        found = see_torch()
    print(json.dumps(found))
