"""The doctor's report as text for people."""

from __future__ import annotations

from collections.abc import Iterator

from parallel_runtime.said import Said, as_said, said, together

from .findings import Finding, gib
from .link_check import LinkCheck
from .machine import EXTRAS, OLDEST, Machine

_LEVELS = {"broken": said("[broken]"), "warning": said("[warning]")}


def write_report(devices: str, machine: Machine, findings: tuple[Finding, ...], link: LinkCheck | None) -> Said:
    """The whole report on these devices, with the outcome of the check; None: it did not run."""
    head = [said("Parallel DiT doctor, pool on {devices}.", devices=devices)]
    broken, warnings = (sum(each.level == level for each in findings) for level in ("broken", "warning"))
    works = said("Everything that is needed works.")
    head.append(said("Broken: {count}.", count=broken) if broken else works)
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
        if version is not None or name not in EXTRAS:
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
