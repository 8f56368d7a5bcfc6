"""The doctor's report as text for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parallel_runtime.said import Said, as_said, said, together

from ..link_result import Rates
from .diagnosis import DoctorReport
from .driver import DriverGpu, describe_link
from .finding import Finding, Level, gib
from .machine import EXTRAS, OLDEST, Gpu, Link, Machine


def render_text(report: DoctorReport) -> Said:
    """The whole report; lines of at most about 120 characters where the facts allow."""
    sections: list[tuple[str, Sequence[str]]] = [
        ("", [_headline(report)]),
        (said("Findings"), list(_findings(report.findings))),
        (said("Versions"), list(_versions(report.machine))),
        (said("Machine"), list(_machine(report.machine))),
        (said("GPUs"), [_gpu(gpu) for gpu in report.machine.gpus] or [said("none")]),
        (said("Links between GPUs"), [_link(link) for link in report.machine.links]),
        (said("Check"), list(_check(report))),
    ]
    return _joined(sections)


def render_first_look(machine: Machine, gpus: Sequence[DriverGpu]) -> Said:
    """What is known at once, before packages are imported and links are tried."""
    sections: list[tuple[str, Sequence[str]]] = [
        ("", [said("Parallel DiT doctor. A first look; packages are being imported, and links are tried after that.")]),
        (said("Versions"), [*_installed(machine), f"{'driver':<13}{machine.driver or 'none'}"]),
        (said("Machine"), list(_machine(machine))),
        (said("GPUs, as the driver counts"), [_driver_gpu(gpu) for gpu in gpus] or [said("none")]),
    ]
    return _joined(sections)


def _driver_gpu(gpu: DriverGpu) -> Said:
    return said(
        "{index}  {name}, {free} free of {total}",
        index=gpu.index,
        name=gpu.name,
        free=gib(gpu.memory_total - gpu.memory_used),
        total=gib(gpu.memory_total),
    )


def _joined(sections: Sequence[tuple[str, Sequence[str]]]) -> Said:
    blocks: list[Said] = []
    for title, lines in sections:
        if lines and title:
            blocks.append(together([title, *(said("  {line}", line=as_said(line)) for line in lines)], "\n"))
        elif lines:
            blocks.append(together(lines, "\n"))
    return said("{report}\n", report=together(blocks, "\n\n"))


def _headline(report: DoctorReport) -> Said:
    broken = sum(finding.level == "broken" for finding in report.findings)
    warnings = sum(finding.level == "warning" for finding in report.findings)
    verdict = said("Everything that is needed works.") if report.works else said("Broken: {count}.", count=broken)
    head = said("Parallel DiT doctor, pool on {devices}.", devices=report.devices)
    return together([head, verdict, said("Warnings: {count}.", count=warnings) if warnings else ""])


_LEVELS: dict[Level, Said] = {"broken": said("[broken]"), "warning": said("[warning]"), "note": said("[note]")}


def _findings(findings: tuple[Finding, ...]) -> Iterator[str]:
    for finding in findings:
        yield said("{level} {what}", level=_LEVELS[finding.level], what=as_said(finding.what))
        if finding.fix:
            yield said("    {fix}", fix=as_said(finding.fix))


def _versions(machine: Machine) -> Iterator[str]:
    yield from _installed(machine)
    yield said("CUDA         {version}", version=machine.cuda or said("none in this torch"))
    yield said("NCCL         {version}", version=machine.nccl or said("none"))
    yield said("driver       {version}", version=machine.driver or said("none"))


def _installed(machine: Machine) -> Iterator[str]:
    yield f"{'Python':<13}{machine.python}"
    for package in machine.packages:
        if package.found is None and package.name in EXTRAS:
            continue
        needs = said("({oldest} or newer)", oldest=OLDEST[package.name])
        found = f"{package.found:<16}" if package.found else said("missing         ")
        yield said("{name}{found}{needs}", name=f"{package.name:<13}", found=found, needs=needs)


def _machine(machine: Machine) -> Iterator[str]:
    if machine.memory_total:
        yield said(
            "memory       {free} available of {total}",
            free=gib(machine.memory_available),
            total=gib(machine.memory_total),
        )
    if machine.shm_total:
        yield said("/dev/shm     {free} free of {total}", free=gib(machine.shm_free), total=gib(machine.shm_total))
    for name, value in machine.environment:
        yield f"{name}={value}"


def _gpu(gpu: Gpu) -> Said:
    return said(
        "{index}  {name}, {free} free of {total}, compute capability {capability}",
        index=gpu.index,
        name=gpu.name,
        free=gib(gpu.memory_free),
        total=gib(gpu.memory_total),
        capability=gpu.capability,
    )


def _link(link: Link) -> Said:
    return said(
        "{first}-{second}  {kind}, {access}",
        first=link.first,
        second=link.second,
        kind=as_said(describe_link(link.kind)) if link.kind else said("kind not known"),
        access="P2P" if link.peer_access else said("no P2P"),
    )


def _check(report: DoctorReport) -> Iterator[str]:
    link = report.link
    if link is None:
        yield said("running: the result comes in a moment") if report.checking else said("not run, see Findings")
        return
    for rates in link.rates:
        yield from _rates(rates)
    if link.failure is not None:
        yield said(
            "failed on {devices} after {seconds} s; the last lines of the ranks:",
            devices=link.devices,
            seconds=f"{link.seconds:.0f}",
        )
        yield from (f"| {line}" for line in link.output.splitlines() or ["(nothing)"])


def _rates(rates: Rates) -> Iterator[str]:
    template = "{backend}, {ranks} ranks: all-reduce and all-to-all give the right numbers"
    if rates.ranks == 1:
        template = "{backend}, {ranks} rank: all-reduce and all-to-all give the right numbers"
    yield said(template, backend=rates.backend, ranks=rates.ranks)
    if rates.all_reduce is not None and rates.all_to_all is not None:
        yield said(
            "    bus bandwidth with {megabytes} MB: all-reduce {reduce} GB/s, all-to-all {all} GB/s",
            megabytes=rates.megabytes,
            reduce=f"{rates.all_reduce:.1f}",
            all=f"{rates.all_to_all:.1f}",
        )
    yield said("    smallest all-reduce: {latency} µs", latency=f"{rates.latency:.0f}")
