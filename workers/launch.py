"""What a pool is made of: devices, ranks, environment, command lines, where its machines meet. No process is started
here."""

from __future__ import annotations

import math
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from parallel_runtime.config import AXES, SHOWN_AXES, ParallelConfig
from parallel_runtime.errors import ConfigurationError
from parallel_runtime.said import Said, said

from .state_folder import state_directory

PACK_ROOT = Path(__file__).resolve().parent.parent
OWN_SESSION: dict[str, Any] = {"cwd": PACK_ROOT, "stdin": subprocess.DEVNULL, "start_new_session": True}
"""How processes of a pool, and of the doctor, are started: Ctrl-C in ComfyUI's terminal is for ComfyUI."""
LISTEN = "PARALLEL_DIT_LISTEN"
_HOW = "docs/several-hosts.md shows how to set up several hosts."
EXPECTED_COMFYUI = "PARALLEL_DIT_COMFYUI"
"""In a rank's environment: the ComfyUI whose code will be wanted, in JSON; see `ComfyuiCode`."""
# ComfyUI may have chosen cudaMallocAsync for itself.
_DROPPED_VARIABLES = (
    "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG", "OMP_NUM_THREADS",
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


@dataclass(frozen=True)
class PoolSpec:
    """Identity of a pool: two configurations with equal specs share one pool."""

    device_type: str  # "cuda" or "cpu"
    devices: tuple[int, ...]  # GPU numbers as ComfyUI counts them, one a rank; on the CPU just 0 .. ranks - 1
    hosts: int = 1  # machines; each has as many ranks as there are devices

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.devices) * self.hosts

    def holds(self, other: PoolSpec) -> bool:
        """Whether this pool, or its first ranks, are what `other` asks for."""
        if self.hosts != other.hosts or self.device_type != other.device_type:
            return False
        # Over several hosts the first ranks are all on the first one, so that a part of such a pool is another thing.
        return self == other or (other.hosts == 1 and self.devices[: len(other.devices)] == other.devices)

    def overlaps(self, other: PoolSpec) -> bool:
        """Whether the two would compute on one device."""
        return self.device_type == other.device_type and bool(set(self.devices) & set(other.devices))

    def __str__(self) -> str:
        devices = f"{self.device_type}:{','.join(map(str, self.devices))}"
        return devices if self.hosts == 1 else f"{devices}*{self.hosts}"

    @classmethod
    def parse(cls, text: str) -> PoolSpec:
        """Inverse of `str`."""
        local, _, hosts = text.partition("*")
        device_type, _, devices = local.partition(":")
        return cls(device_type, tuple(int(device) for device in devices.split(",")), int(hosts or 1))


def resolve_devices(config: ParallelConfig, gpu_count: Callable[[], int]) -> PoolSpec:
    """Turn the artist's `devices` into ranks; ConfigurationError where there are too few."""
    wanted = config.device_indices
    if config.devices.startswith("cpu"):
        spec = PoolSpec("cpu", tuple(range(int(config.devices.partition(":")[2] or 1))), config.hosts)
    else:
        present = gpu_count()
        if wanted is not None and max(wanted) >= present:
            what = "The parallel configuration asks for GPU {wanted}, but ComfyUI sees {gpus}."
            fix = "Set devices to auto, or to GPUs that exist (they are counted from 0)."
            raise ConfigurationError(what, fix, wanted=max(wanted), gpus=_gpus(present))
        spec = PoolSpec("cuda" if present else "cpu", wanted or tuple(range(present or 1)), config.hosts)
    degrees = {axis: getattr(config, axis) or 1 for axis in AXES}
    ranks = math.prod(degrees.values())
    if ranks > spec.world_size:
        product = " × ".join(f"{SHOWN_AXES.get(axis, axis)} {degree}" for axis, degree in degrees.items() if degree > 1)
        has = count_devices(spec.device_type, spec.world_size)
        what = "The parallel configuration needs {ranks} devices ({product}), and has {devices}."
        fix = "Lower a degree, set it to auto, or add devices."
        raise ConfigurationError(what, fix, ranks=ranks, product=product, devices=has)
    return spec


def count_devices(kind: str, count: int) -> Said:
    """How many GPUs or CPU ranks."""
    one, several = "{count} CPU process", "{count} CPU processes"
    if kind == "cuda":
        one, several = "{count} GPU", "{count} GPUs"
    return said(several if count > 1 else one, count=count)


def _gpus(count: int) -> Said:
    if count == 0:
        return said("no GPU")
    return said("one GPU, number 0") if count == 1 else said("{count} GPUs, 0 to {last}", count=count, last=count - 1)


def rank_environment(spec: PoolSpec, directory: Path, base: Mapping[str, str], interface: str = "lo") -> dict[str, str]:
    """Environment of ranks (of torchrun, which starts them), whose collectives use this network interface."""
    environment = {key: value for key, value in base.items() if key not in _DROPPED_VARIABLES}
    compiled = base.get("TORCHINDUCTOR_CACHE_DIR") or str(state_directory() / "compiled")
    share, given = (os.cpu_count() or 1) // len(spec.devices), base.get("OMP_NUM_THREADS", "")
    return environment | {
        "PARALLEL_DIT_POOL": str(directory),
        "PARALLEL_DIT_DEVICES": str(spec),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(PACK_ROOT), base.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(directory),  # torchrun leaves folders behind; these go with the pool
        "PARALLEL_DIT_STATE": str(state_directory()),
        "TORCHINDUCTOR_CACHE_DIR": compiled,
        # PyTorch says where when it first makes a kernel; before, ours would lie where nobody finds them.
        "TRITON_CACHE_DIR": base.get("TRITON_CACHE_DIR") or os.path.join(compiled, "triton"),
        # A rank's share of the cores, or fewer where somebody says so.
        "OMP_NUM_THREADS": str(max(1, min(share, int(given)) if given.isdecimal() else share)),
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        # Each channel takes memory of the GPU, which a pool that is idle keeps, and NVLink alone would have more: what
        # our ranks send by NCCL is small where they can write to each other's memory.
        "NCCL_MAX_NCHANNELS": base.get("NCCL_MAX_NCHANNELS") or "8",
        # NCCL would register what recorded collectives send and get, and takes each for one piece of memory: of several
        # in expandable segments, ranks that replay would wait for ever (pytorch/pytorch#158029).
        "NCCL_GRAPH_REGISTER": "0",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }


def rank_commands(spec: PoolSpec, rank_module: str, meeting: str = "") -> list[tuple[list[str], dict[str, str]]]:
    """Command lines that start this machine's ranks, each with what its environment has beside `rank_environment`.

    On one machine they are the ranks', which find there what torchrun would say: it imports torch before it starts
    them, a second or more of each start. Those of several machines meet by torchrun at `meeting`, address and port of
    this one (docs/several-hosts.md); `--max-restarts=0`: a broken pool is replaced whole, not patched up."""
    run, count = [sys.executable, "-m"], len(spec.devices)
    if not meeting:
        world = {"WORLD_SIZE": f"{count}", "LOCAL_WORLD_SIZE": f"{count}", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
        ranks = map(str, range(count))
        return [([*run, rank_module], {"RANK": rank, "LOCAL_RANK": rank, **world}) for rank in ranks]
    torchrun = [*run, "torch.distributed.run", f"--nnodes={spec.hosts}", f"--nproc-per-node={count}"]
    # The supervisor hears of a rank's end by itself: to look every tenth of a second would cost idle time.
    torchrun += ["--max-restarts=0", "--monitor-interval=1", f"--rdzv-endpoint={meeting}", "--node-rank=0"]
    return [([*torchrun, "-m", rank_module], {})]


def read_seconds(environment: Mapping[str, str], name: str, default: float) -> float:
    """A time in seconds, above 0; ConfigurationError where the variable holds something else."""
    text = environment.get(name, "")
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        what = "The environment variable {name} is {text}, which is no time in seconds."
        fix = "Set it to a number such as {default}, or remove it."
        raise ConfigurationError(what, fix, name=name, text=repr(text[:40]), default=f"{default:g}")
    return seconds


def read_meeting(environment: Mapping[str, str]) -> tuple[str, int]:
    """Where torchrun of the first machine listens for the others; ConfigurationError if that is not set, or is none."""
    text = environment.get(LISTEN)
    if not text:
        what = "The parallel configuration asks for several hosts, but ${listen} is not set where ComfyUI runs."
        raise ConfigurationError(what, _HOW, listen=LISTEN)
    match = re.fullmatch(r"([0-9A-Za-z_.\-]+):(\d{1,5})", text.strip())
    if not match or not 0 < int(match[2]) < 65536:
        what = "{text} is not an address with a port."
        raise ConfigurationError(what, "Write it as 10.0.0.1:29600.", text=repr(text))
    try:
        return socket.gethostbyname(match[1]), int(match[2])
    except (OSError, UnicodeError) as error:
        what = "${listen} is {text}, and {name} has no IP address: {error}."
        raise ConfigurationError(what, _HOW, listen=LISTEN, text=text, name=match[1], error=error) from error


def open_meeting(environment: Mapping[str, str]) -> tuple[str, str]:
    """The interface, and address and port, at which the machines of a pool meet. Where torchrun, which listens there on
    this one, would only say it in its log, it is a ConfigurationError with its cause."""
    address, port = read_meeting(environment)
    interface, where = interface_of(address), f"{address}:{port}"
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            what = "Cannot listen on {where}: {strerror}."
            fix = "Set ${listen} to an address of this host with a free port."
            raise ConfigurationError(what, fix, where=where, strerror=error.strerror, listen=LISTEN) from error
    return interface, where


def interface_of(address: str) -> str:
    """Name of the network interface that has this IP address: gloo and NCCL are told to use it."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.family == socket.AF_INET and entry.address == address for entry in entries):
            return name
    raise ConfigurationError("No network interface of this host has the address {address}.", _HOW, address=address)


def own_address(towards: str) -> str:
    """This machine's address on the way to another one. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 1))
        return probe.getsockname()[0]
