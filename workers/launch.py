"""What a pool is made of: devices, ranks, environment, command line. No process is started here."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import ConfigurationError

PACK_ROOT = Path(__file__).resolve().parent.parent

_DROPPED_VARIABLES = (
    "PYTORCH_CUDA_ALLOC_CONF",  # ComfyUI may have chosen cudaMallocAsync for itself
    "CUBLAS_WORKSPACE_CONFIG",
    "OMP_NUM_THREADS",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@dataclass(frozen=True)
class PoolSpec:
    """Identity of a pool: two configurations with equal specs share one pool.

    Args:
        device_type: "cuda" or "cpu".
        devices: GPU numbers as ComfyUI counts them, one a rank; on the CPU just 0 .. ranks - 1.
    """

    device_type: str
    devices: tuple[int, ...]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.devices)

    def __str__(self) -> str:
        return f"{self.device_type}:{','.join(map(str, self.devices))}"

    @classmethod
    def parse(cls, text: str) -> PoolSpec:
        """Inverse of `str`."""
        device_type, _, devices = text.partition(":")
        return cls(device_type, tuple(int(device) for device in devices.split(",")))


def resolve_devices(config: ParallelConfig, gpu_count: Callable[[], int]) -> PoolSpec:
    """Turn the artist's `devices` into ranks.

    Raises:
        ConfigurationError: more ranks than GPUs, or explicit degrees that need more ranks than there are.
    """
    wanted = config.device_indices
    if config.devices.startswith("cpu"):
        spec = PoolSpec("cpu", tuple(range(int(config.devices.partition(":")[2] or 1))))
    else:
        present = gpu_count()
        if wanted is not None and max(wanted) >= present:
            raise ConfigurationError(
                f"The parallel configuration asks for GPU {max(wanted)}, but ComfyUI sees {_gpus(present)}.",
                "Set devices to auto, or to GPUs that exist (they are counted from 0).",
            )
        if present == 0:
            spec = PoolSpec("cpu", (0,))
        else:
            spec = PoolSpec("cuda", wanted or tuple(range(present)))
    degrees = {axis: getattr(config, axis) or 1 for axis in ("data", "cfg", "ulysses")}
    ranks = degrees["data"] * degrees["cfg"] * degrees["ulysses"]
    if ranks > spec.world_size:
        product = " × ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1)
        kind = "GPU" if spec.device_type == "cuda" else "CPU rank"
        raise ConfigurationError(
            f"The parallel configuration needs {ranks} ranks ({product}), but its devices are "
            f"{spec.world_size} {kind}{'s' if spec.world_size > 1 else ''}.",
            "Lower a degree, set it to auto, or add devices.",
        )
    return spec


def _gpus(count: int) -> str:
    if count == 0:
        return "no GPU"
    return "one GPU, number 0" if count == 1 else f"{count} GPUs, 0 to {count - 1}"


def rank_environment(spec: PoolSpec, directory: Path, base: Mapping[str, str]) -> dict[str, str]:
    """Environment of torchrun and its ranks. Everything listens on the loopback interface only."""
    environment = {key: value for key, value in base.items() if key not in _DROPPED_VARIABLES}
    threads = max(1, (os.cpu_count() or 1) // spec.world_size)
    environment |= {
        "PARALLEL_DIT_POOL": str(directory),
        "PARALLEL_DIT_DEVICES": str(spec),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(PACK_ROOT), base.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        # Ranks meet through a file in the pool's private directory. With this set, torchrun opens no TCP store of
        # its own, which would listen on every interface.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    return environment


def torchrun_command(spec: PoolSpec, directory: Path, rank_module: str) -> list[str]:
    """Command line of the ranks' parent. `--max-restarts=0`: a broken pool is replaced whole, never patched up."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=1",
        f"--nproc-per-node={spec.world_size}",
        "--max-restarts=0",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={directory / 'rendezvous'}",
        "--rdzv-conf=store_type=file",
        f"--rdzv-id={uuid.uuid4().hex}",
        "-m",
        rank_module,
    ]


def log_directory() -> Path:
    """Folder of the pools' logs, which outlive their pools. $PARALLEL_DIT_LOGS overrides it."""
    chosen = os.environ.get("PARALLEL_DIT_LOGS")
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(chosen) if chosen else Path(state) / "parallel-dit" / "logs"
