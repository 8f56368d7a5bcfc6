"""What plans reckon with on this machine: measured once, kept in the state directory, constants until then.

Numbers are of GPUs by their UUIDs: which GPU is number 0 changes with CUDA_VISIBLE_DEVICES, and with the machine where
the state directory is on a network.

The ranks of a pool measure when a model is first loaded; `gpus.py` asks torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from parallel_runtime import measured
from parallel_runtime.requests.facts import CPU, ETHERNET, HOST_MEMORY, NVLINK, PCIE, LinkFacts, MachineFacts, known_gpu

from .launch import PoolSpec, state_directory

_NVLINK_GPUS = re.compile(r"\b(A100|A800|H100|H200|H800|H20|B200|GB200)\b(?!.*PCIe)")
"""GPUs that come with NVLink to all others of a host; GPUs whose links are told apart by the driver need no guess."""


@dataclass(frozen=True)
class GpuId:
    """Which GPU: its name, and its UUID without the prefix "GPU-"; "" where torch does not tell it."""

    name: str
    uuid: str


Known = Callable[[PoolSpec, tuple[GpuId, ...], int, LinkFacts], MachineFacts]
_USABLE = 0.92
"""Share of a GPU's memory that a rank may plan with; the rest is the display's, the driver's and fragmentation."""


def guess_link(gpu: str, peer_access: bool, kind: str | None = None) -> LinkFacts:
    """Return the constants of a kind of link.

    Args:
        gpu: its name.
        peer_access: the GPUs reach each other's memory.
        kind: as `driver.find_links` has it ("NV18", "PIX"); None: not known.
    """
    if not peer_access or os.environ.get("NCCL_P2P_DISABLE") == "1":
        return HOST_MEMORY
    nvlink = kind.startswith("NV") if kind is not None else bool(_NVLINK_GPUS.search(gpu))
    return NVLINK if nvlink else PCIE


def assume(spec: PoolSpec, gpus: tuple[GpuId, ...], memory_bytes: int, link: LinkFacts) -> MachineFacts:
    """Return constants of such a pool, for as long as nothing is measured; arguments as in `recall`."""
    if spec.device_type == "cpu":
        return CPU
    assumed = known_gpu(gpus[0].name, int(memory_bytes * _USABLE), link)
    return assumed if spec.hosts == 1 else replace(assumed, network=ETHERNET, ranks_per_host=len(spec.devices))


def recall(spec: PoolSpec, gpus: tuple[GpuId, ...], memory_bytes: int, link: LinkFacts) -> MachineFacts:
    """Return what is known of a pool's machine: measured numbers where there are any.

    Args:
        gpus: of each rank; the first stands for the others where nothing is measured.
        memory_bytes: of the smallest GPU.
        link: what to take for the links before they are measured.
    """
    assumed = assume(spec, gpus, memory_bytes, link)
    entry = measured.recall(_folder(), _key(spec, gpus, link)) if assumed.on_gpu else None
    return (_facts(entry, assumed.memory_bytes) if isinstance(entry, dict) else None) or assumed


def remember_facts(spec: PoolSpec, gpus: tuple[GpuId, ...], facts: MachineFacts) -> None:
    """Keep measured facts for later pools on the same devices; where the folder cannot be written, do not."""
    if spec.device_type != "cpu":
        measured.keep(_folder(), _key(spec, gpus, facts.link), asdict(facts))


def _folder() -> Path:
    return state_directory() / "measured"


def _key(spec: PoolSpec, gpus: tuple[GpuId, ...], link: LinkFacts) -> str:
    """Everything that the numbers depend on; which rank has which of the GPUs is not."""
    which = ", ".join(sorted(f"{gpu.name} {gpu.uuid}" for gpu in gpus))
    reach = "no P2P" if link.name == HOST_MEMORY.name else "P2P"
    return f"ranks | {spec.hosts} hosts of {which} | {reach} | {measured.software()}"


def _facts(entry: dict[str, Any], memory_bytes: int) -> MachineFacts | None:
    """What was kept, with today's memory; None where another version wrote it."""
    try:
        network = LinkFacts(**entry["network"]) if entry["network"] else None
        return MachineFacts(
            **{
                **entry,
                "host_rate": entry["host_rate"],  # versions that did not measure it are asked to measure anew
                "link": LinkFacts(**entry["link"]),
                "network": network,
                "memory_bytes": memory_bytes,
                "speeds": (),  # the ranks know them when they have started
            }
        )
    except (KeyError, TypeError):
        return None
