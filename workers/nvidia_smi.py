"""What `nvidia-smi` says about GPUs and their links. The tool may be missing; then there is just less to say."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass

TOOL_SECONDS = 20.0

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"GPU(\d+)")
_KIND = re.compile(r"NV\d+|PIX|PXB|PHB|NODE|SYS")
_PCIE = {
    "PIX": "PCIe, one switch between",
    "PXB": "PCIe, several switches between",
    "PHB": "PCIe, through the CPU",
    "NODE": "PCIe, through the CPU and its host bridges",
    "SYS": "PCIe, from one CPU socket to another",
}


@dataclass(frozen=True)
class DriverGpu:
    """A GPU as the driver counts it, which is not how CUDA counts where CUDA_VISIBLE_DEVICES is set.

    Args:
        index: number in nvidia-smi's tables.
        uuid: without the prefix "GPU-".
        memory_used: bytes in use when asked.
        driver: version of the driver.
    """

    index: int
    uuid: str
    memory_used: int
    driver: str


def ask(*arguments: str) -> str:
    """Output of nvidia-smi with these arguments; "" where the tool is missing, fails, or does not answer."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=TOOL_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def find_trouble() -> str | None:
    """What nvidia-smi says when it cannot do its work; None when it can, or is missing, or there is no GPU."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=TOOL_SECONDS)
    except subprocess.TimeoutExpired:
        return f"nvidia-smi did not answer within {TOOL_SECONDS:.0f} seconds"
    except OSError:
        return None
    said = " ".join(f"{done.stdout} {done.stderr}".split())
    return None if done.returncode == 0 or "No devices" in said else f"nvidia-smi says: {said[:200].rstrip('.')}"


def list_gpus() -> tuple[DriverGpu, ...]:
    """The driver's GPUs."""
    return parse_gpus(ask("--query-gpu=index,uuid,memory.used,driver_version", "--format=csv,noheader,nounits"))


def parse_gpus(table: str) -> tuple[DriverGpu, ...]:
    """Read the lines `0, GPU-1234, 512, 570.86.15`; memory comes in MiB. What is no such line is left out."""
    gpus = []
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 4 and cells[0].isdigit():
            used = int(cells[2]) << 20 if cells[2].isdigit() else 0  # [N/A] under some virtual GPUs
            gpus.append(DriverGpu(int(cells[0]), cells[1].removeprefix("GPU-"), used, cells[3]))
    return tuple(gpus)


def parse_topology(table: str) -> dict[tuple[int, int], str]:
    """Read the matrix of `nvidia-smi topo -m`: (GPU, GPU) -> "NV18", "PIX", "PXB", "PHB", "NODE" or "SYS".

    Columns beside the GPUs' (network cards, CPU affinity) and the legend are passed over. A table in a shape that is
    not known gives no entries.
    """
    columns: dict[int, int] = {}
    kinds = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in _ANSI.sub("", line).split("\t")]
        numbers = {place: int(match[1]) for place, cell in enumerate(cells) if (match := _GPU.fullmatch(cell))}
        if not columns:
            columns = numbers if 0 not in numbers else {}
        elif 0 in numbers:
            for place, other in columns.items():
                if place < len(cells) and _KIND.fullmatch(cells[place]):
                    kinds[numbers[0], other] = cells[place]
    return kinds


def describe_link(kind: str) -> str:
    """A link's kind in words."""
    if kind.startswith("NV"):
        return f"NVLink ({kind[2:]} {'link' if kind == 'NV1' else 'links'})"
    return _PCIE[kind]
