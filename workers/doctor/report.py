"""From facts to findings (what is broken, what slows down, what would not help), and to the report, text for people."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from parallel_runtime.said import Said, as_said, said, together

from ..launch import PACK_ROOT, PoolSpec
from .link_check import LinkCheck
from .machine import OLDEST, Machine

_SHM_BYTES = 1 << 29
_LEVELS = {"broken": said("[broken]"), "warning": said("[warning]")}
_FIXES = {
    "OutOfMemory": "Free about 1 GiB on every GPU (Unload Models in ComfyUI, or close other programs), and try again.",
    "could not start": "Make room in the temporary folder ($TMPDIR or /tmp), and look at the limits on processes and "
    "open files.",
    "finish .*starting Python": "A slow disk or a busy machine takes its time to start Python: try "
    "again with --limit 300.",
    "NCCL|GPU": "Try again with NCCL_P2P_DISABLE=1 in the environment: if that works, P2P between the GPUs is faulty, "
    "most often for IOMMU or ACS in the BIOS. NCCL_DEBUG=INFO makes NCCL say more.",
    "": "The ranks talk over the loopback interface: look whether lo is up and 127.0.0.1 is not filtered.",
}
"""What the failure of a check says -> what to do; the first that fits."""


@dataclass(frozen=True)
class Finding:
    """Cause and fix. "broken" makes the doctor fail; "warning" costs speed or may fail later."""

    level: Literal["broken", "warning"]
    what: str
    fix: str


def find(spec: PoolSpec, machine: Machine, link: LinkCheck | None) -> tuple[Finding, ...]:
    """Judge the facts for a pool on `spec`; what is broken comes first."""
    findings = [*find_in_software(machine), *_find_in_devices(spec, machine)]
    if link is not None and link.failure is not None:
        fits = next(pattern for pattern in _FIXES if re.search(pattern, link.failure))
        findings.append(Finding("broken", said("{failure}.", failure=link.failure), _FIXES[fits]))
    return tuple(sorted(findings, key=lambda finding: finding.level))


def find_in_software(machine: Machine) -> Iterator[Finding]:
    """Packages, and whether torch and the driver agree."""
    for name in OLDEST:
        yield from _find_in_package(name, machine.packages[name])
    torch = machine.packages["torch"]
    hidden = len(machine.gpus) < len(machine.driver_gpus) and "CUDA_VISIBLE_DEVICES" not in machine.environment
    if torch is not None and machine.problem is not None:
        fix = "If that names a package, install it again; else reinstall the driver if nvidia-smi does not answer."
        yield Finding("broken", said("{problem}.", problem=machine.problem), fix)
    elif torch is not None and hidden and machine.cuda is None:
        what = "The driver lists GPUs, and torch {found} was built without CUDA."
        fix = "Install a build of torch with CUDA; pytorch.org/get-started gives the command."
        yield Finding("broken", said(what, found=torch), fix)
    elif torch is not None and (hidden or (not machine.gpus and machine.gpu_problem)):
        what = "The driver lists {count} GPUs, and torch sees {seen}{why}."
        why = f" ({machine.gpu_problem})" if machine.gpu_problem else ""
        fix = "Install a driver that is as new as torch's CUDA ({cuda}), and restart the machine."
        values = {"count": len(machine.driver_gpus), "seen": len(machine.gpus), "why": why}
        yield Finding("broken", said(what, **values), said(fix, cuda=machine.cuda))


def _find_in_package(name: str, found: str | None) -> Iterator[Finding]:
    fix = said("Run ComfyUI's Python with: -m pip install -r {file}", file=PACK_ROOT / "requirements.txt")
    if name in ("torch", "safetensors", "psutil"):  # an install for this pack must never replace ComfyUI's
        fix = said("Install {name} as ComfyUI's instructions say.", name=name)
    if found is None:
        what = said("The Python package {name} is missing.", name=name)
    elif is_older(found, OLDEST[name]):
        needs = "{name} {found} is too old: {oldest} or newer is needed."
        what = said(needs, name=name, found=found, oldest=OLDEST[name])
    else:
        return
    yield Finding("broken", what, fix)


def _find_in_devices(spec: PoolSpec, machine: Machine) -> Iterator[Finding]:
    if spec.device_type == "cpu" and machine.problem is None and not machine.driver_gpus:
        what = "This machine has no GPU that torch can use: the pool computes on the CPU."
        fix = "That is good for trying the nodes out, and far too slow for work; run ComfyUI on a machine with GPUs."
        yield Finding("warning", what, fix)
    chosen = set(spec.devices) if spec.device_type == "cuda" else set()
    for gpu in machine.gpus:
        if gpu.index in chosen and is_older(gpu.capability, "8.0"):
            what = "GPU {index} ({name}, compute capability {capability}) is slow in bfloat16 or lacks it."
            values = {"index": gpu.index, "name": gpu.name, "capability": gpu.capability}
            yield Finding("warning", said(what, **values), "Set weight_dtype to fp16 in Parallel Loader.")
    links = [link for link in machine.links if {link.first, link.second} <= chosen]
    apart = [f"{link.first}-{link.second}" for link in links if not link.peer_access]
    if apart:
        what = (
            "GPUs without P2P: {pairs} cannot reach each other's memory, so everything that they exchange "
            "goes through the host's memory."
        )
        fix = (
            "Splitting the batch (CFG, data) exchanges next to nothing, and PipeFusion (stages, in Parallel Sampler) "
            "little; auto knows. Under a hypervisor, or with IOMMU or ACS on, P2P may only be switched off."
        )
        yield Finding("warning", said(what, pairs=", ".join(apart)), fix)
    elif machine.environment.get("NCCL_P2P_DISABLE", "0") != "0" and links:
        what = "NCCL_P2P_DISABLE is set, so GPUs that could reach each other's memory exchange through the host's."
        yield Finding("warning", what, "Unset it, unless the check fails without it.")
    if spec.world_size > 1 and machine.shm_free < _SHM_BYTES:
        what = "/dev/shm has {shm_free} MiB left, and NCCL exchanges through it where GPUs have no P2P."
        fix = "Start the container with --shm-size=1g or more, or empty /dev/shm."
        yield Finding("warning", said(what, shm_free=machine.shm_free >> 20), fix)


def is_older(version: str, oldest: str) -> bool:
    """Whether a version is older than the oldest that is good enough; its previews count as itself: 2.6.0a0 is 2.6."""
    from packaging.version import InvalidVersion, Version  # which may be missing where ComfyUI's node reads this file

    try:
        return Version(Version(version).base_version) < Version(oldest)
    except InvalidVersion:  # somebody's own build, who knows what is in it
        return False


def write_report(devices: str, machine: Machine, findings: tuple[Finding, ...], link: LinkCheck | None) -> Said:
    """The whole report on these devices, with the outcome of the check; None: it did not run."""
    head = [said("Parallel DiT doctor, pool on {devices}.", devices=devices)]
    broken, warnings = (sum(each.level == level for each in findings) for level in ("broken", "warning"))
    head.append(said("Broken: {count}.", count=broken) if broken else said("Everything that is needed works."))
    head.append(said("Warnings: {count}.", count=warnings) if warnings else as_said(""))
    sections = {
        said("Findings"): _findings(findings),
        said("Versions"): _versions(machine),
        said("Machine"): _machine(machine),
        said("GPUs"): _gpus(machine),
        said("Check"): _check(link),
    }
    blocks = [together(head)]
    for title, lines in sections.items():
        if written := [said("  {line}", line=as_said(line)) for line in lines]:
            blocks.append(together([title, *written], "\n"))
    return said("{report}\n", report=together(blocks, "\n\n"))


def _findings(findings: tuple[Finding, ...]) -> Iterator[str]:
    for finding in findings:
        yield said("{level} {what}", level=_LEVELS[finding.level], what=as_said(finding.what))
        yield said("    {fix}", fix=as_said(finding.fix))


def _versions(machine: Machine) -> Iterator[str]:
    for name, version in machine.packages.items():
        needs = said("({oldest} or newer)", oldest=OLDEST[name])
        found = f"{version:<16}" if version else said("missing         ")
        yield said("{name}{found}{needs}", name=f"{name:<13}", found=found, needs=needs)
    for name, known in (("CUDA", machine.cuda), ("NCCL", machine.nccl)):
        if known:
            yield f"{name:<13}{known}"


def _machine(machine: Machine) -> Iterator[str]:
    values = {"free": gib(machine.memory_available), "total": gib(machine.memory_total)}
    yield said("memory       {free} available of {total}", **values)
    yield said("/dev/shm     {free} free", free=gib(machine.shm_free))
    yield from (f"{name}={value}" for name, value in machine.environment.items())


def _gpus(machine: Machine) -> Iterator[str]:
    for gpu in machine.gpus:
        free, total = gib(gpu.memory_total - gpu.memory_used), gib(gpu.memory_total)
        line = "{index}  {name}, {free} free of {total}, driver {driver}"
        yield said(line, index=gpu.index, name=gpu.name, free=free, total=total, driver=gpu.driver)
    for link in machine.links:
        kind = as_said(link.kind) if link.kind else said("kind not known")
        access = "P2P" if link.peer_access else said("no P2P")
        yield said("{first}-{second}  {kind}, {access}", first=link.first, second=link.second, kind=kind, access=access)


def _check(link: LinkCheck | None) -> Iterator[str]:
    if link is None:
        yield said("not run, see Findings")
    elif link.failure is not None:
        yield said("failed on {devices}; the last lines of the ranks:", devices=link.devices)
        yield from (f"| {line}" for line in link.output.splitlines() or ["(nothing)"])
    else:
        yield said("{backend} on {devices}: the right numbers", backend=link.backend, devices=link.devices)
        if link.rate:
            rate = "    {rate} GB/s with {megabytes} MB, {latency} µs with 4 bytes"
            rounded = {"rate": f"{link.rate:.1f}", "latency": f"{link.latency:.0f}"}
            yield said(rate, **rounded, megabytes=link.megabytes)


def gib(size: int) -> str:
    """Bytes as text in GiB."""
    return f"{size / 2**30:.1f} GiB"
