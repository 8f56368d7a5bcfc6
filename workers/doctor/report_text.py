"""The doctor's report as text for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..link_result import Rates
from .diagnosis import DoctorReport, exchange_seconds, exchanged_bytes
from .driver import DriverGpu, describe_link
from .finding import Finding, gib
from .machine import OLDEST, Gpu, Link, Machine


def render_text(report: DoctorReport) -> str:
    """The whole report; lines of at most about 120 characters where the facts allow."""
    sections = [
        ("", [_headline(report)]),
        ("Findings", list(_findings(report.findings))),
        ("Versions", list(_versions(report.machine))),
        ("Machine", list(_machine(report.machine))),
        ("GPUs", [_gpu(gpu) for gpu in report.machine.gpus] or ["none"]),
        ("Links between GPUs", [_link(link) for link in report.machine.links]),
        ("Check", list(_check(report))),
        ("What auto does with FLUX.1 dev (24 heads)", [f"{p.request}: {p.why}" for p in report.plans]),
    ]
    return _joined(sections)


def render_first_look(machine: Machine, gpus: Sequence[DriverGpu]) -> str:
    """What is known at once, before packages are imported and links are tried."""
    sections = [
        ("", ["Parallel DiT doctor. A first look; packages are being imported, and links are tried after that."]),
        ("Versions", [*_installed(machine), f"{'driver':<13}{machine.driver or 'none'}"]),
        ("Machine", list(_machine(machine))),
        ("GPUs, as the driver counts", [_driver_gpu(gpu) for gpu in gpus] or ["none"]),
    ]
    return _joined(sections)


def _driver_gpu(gpu: DriverGpu) -> str:
    return f"{gpu.index}  {gpu.name}, {gib(gpu.memory_total - gpu.memory_used)} free of {gib(gpu.memory_total)}"


def _joined(sections: list[tuple[str, list[str]]]) -> str:
    blocks = []
    for title, lines in sections:
        if lines:
            indent = "  " if title else ""
            blocks.append("\n".join(([title] if title else []) + [indent + line for line in lines]))
    return "\n\n".join(blocks) + "\n"


def _headline(report: DoctorReport) -> str:
    broken = sum(finding.level == "broken" for finding in report.findings)
    warnings = sum(finding.level == "warning" for finding in report.findings)
    verdict = "Everything that is needed works." if report.works else f"Broken: {broken}."
    return f"Parallel DiT doctor, pool on {report.devices}. {verdict}" + (f" Warnings: {warnings}." if warnings else "")


def _findings(findings: tuple[Finding, ...]) -> Iterator[str]:
    for finding in findings:
        yield f"[{finding.level}] {finding.what}"
        if finding.fix:
            yield f"    {finding.fix}"


def _versions(machine: Machine) -> Iterator[str]:
    yield from _installed(machine)
    yield f"{'CUDA':<13}{machine.cuda or 'none in this torch'}"
    yield f"{'NCCL':<13}{machine.nccl or 'none'}"
    yield f"{'driver':<13}{machine.driver or 'none'}"


def _installed(machine: Machine) -> Iterator[str]:
    yield f"{'Python':<13}{machine.python}"
    for package in machine.packages:
        needs = f"({OLDEST[package.name]} or newer)"
        yield f"{package.name:<13}{package.found or 'missing':<16}{needs}"


def _machine(machine: Machine) -> Iterator[str]:
    if machine.memory_total:
        yield f"memory       {gib(machine.memory_available)} available of {gib(machine.memory_total)}"
    if machine.shm_total:
        yield f"/dev/shm     {gib(machine.shm_free)} free of {gib(machine.shm_total)}"
    for name, value in machine.environment:
        yield f"{name}={value}"


def _gpu(gpu: Gpu) -> str:
    return (
        f"{gpu.index}  {gpu.name}, {gib(gpu.memory_free)} free of {gib(gpu.memory_total)}, "
        f"compute capability {gpu.capability}"
    )


def _link(link: Link) -> str:
    kind = describe_link(link.kind) if link.kind else "kind not known"
    return f"{link.first}-{link.second}  {kind}, {'P2P' if link.peer_access else 'no P2P'}"


def _check(report: DoctorReport) -> Iterator[str]:
    link = report.link
    if link is None:
        yield "running: the result comes in a moment" if report.checking else "not run, see Findings"
        return
    for rates in link.rates:
        yield from _rates(rates)
    if link.failure is None:
        measured = exchange_seconds(link.rates[0])
        if measured is not None:
            sent = exchanged_bytes(link.rates[0].ranks) / 1e9
            yield (
                f"A step of FLUX.1 at 1024 × 1024 split over {link.rates[0].ranks} ranks by ulysses sends "
                f"{sent:.2f} GB per rank: {1e3 * measured:.1f} ms at this rate."
            )
    else:
        yield f"failed on {link.devices} after {link.seconds:.0f} s; the last lines of the ranks:"
        yield from (f"| {line}" for line in link.output.splitlines() or ["(nothing)"])


def _rates(rates: Rates) -> Iterator[str]:
    ranks = "1 rank" if rates.ranks == 1 else f"{rates.ranks} ranks"
    yield f"{rates.backend}, {ranks}: all-reduce and all-to-all give the right numbers"
    if rates.all_reduce is not None and rates.all_to_all is not None:
        yield (
            f"    bus bandwidth with {rates.megabytes} MB: all-reduce {rates.all_reduce:.1f} GB/s, "
            f"all-to-all {rates.all_to_all:.1f} GB/s"
        )
    yield f"    smallest all-reduce: {rates.latency:.0f} µs"
