"""From facts to findings: what is broken, what slows down, what would not help. Pure; nothing is measured here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from parallel_runtime.requests.facts import CPU, MachineFacts
from parallel_runtime.said import said

from ..launch import PACK_ROOT, PoolSpec
from ..link_result import LinkCheck
from ..machine_facts import GpuId, Known, assume, guess_link, with_check
from .finding import Finding, Level, count, is_older
from .gpu_findings import find_in_gpus, find_in_memory, find_on_cpu
from .machine import EXTRAS, OF_COMFYUI, OLDEST, Machine, Package

OLDEST_PYTHON = "3.10"


@dataclass(frozen=True)
class DoctorReport:
    """Everything the doctor found out.

    Args:
        devices: a PoolSpec as text.
        link: None where no check could run, or while it is `checking`.
    """

    devices: str
    machine: Machine
    link: LinkCheck | None
    findings: tuple[Finding, ...]
    checking: bool = False

    @property
    def works(self) -> bool:
        """Nothing is broken."""
        return all(finding.level != "broken" for finding in self.findings)


def report(spec: PoolSpec, machine: Machine, link: LinkCheck | None) -> DoctorReport:
    """Judge the facts for a pool on `spec`."""
    findings = [
        *find_in_software(machine),
        *(find_in_gpus(spec, machine) if spec.device_type == "cuda" else find_on_cpu(spec, machine)),
        *find_in_memory(spec, machine),
        *(find_in_link(link) if link is not None else ()),
    ]
    order = ("broken", "warning", "note")
    findings.sort(key=lambda finding: order.index(finding.level))
    return DoctorReport(str(spec), machine, link, tuple(findings))


def can_check_links(machine: Machine) -> bool:
    """The check needs a Python that imports these."""
    packages = (machine.package("torch"), machine.package("psutil"))
    return all(package is not None and package.found and not package.problem for package in packages)


def facts_of(spec: PoolSpec, machine: Machine, check: LinkCheck | None, known: Known = assume) -> MachineFacts:
    """What plans reckon with: what is `known` of such GPUs and links, and what this check measured."""
    gpus = [gpu for gpu in machine.gpus if gpu.index in spec.devices]
    if spec.device_type == "cpu" or not gpus:
        return CPU
    inside = [link for link in machine.links if link.first in spec.devices and link.second in spec.devices]
    # The slowest pair sets the pace of all.
    links = [guess_link(gpus[0].name, link.peer_access, link.kind) for link in inside]
    link = min(links, key=lambda link: link.all_to_all, default=guess_link(gpus[0].name, True))
    smallest = min(gpu.memory_total - gpu.memory_used for gpu in gpus)
    return with_check(known(spec, tuple(GpuId(gpu.name, gpu.uuid) for gpu in gpus), smallest, link), check)


def find_in_software(machine: Machine) -> Iterator[Finding]:
    """Python, packages, and whether torch and the driver agree."""
    if machine.problem is not None:
        yield Finding(
            "broken",
            said("{problem}.", problem=machine.problem),
            "Look whether nvidia-smi answers; if it does not, restart the machine or reinstall the driver.",
        )
    if is_older(machine.python, OLDEST_PYTHON):
        yield Finding(
            "broken",
            said(
                "Python {python} runs ComfyUI, and {oldest_python} or newer is needed.",
                python=machine.python,
                oldest_python=OLDEST_PYTHON,
            ),
            "Give ComfyUI a newer Python.",
        )
    for package in machine.packages:
        yield from _find_in_package(package)
    yield from _find_lost_gpus(machine)


def _find_lost_gpus(machine: Machine) -> Iterator[Finding]:
    """GPUs that are there and that torch does not see."""
    torch = machine.package("torch")
    hidden = any(name == "CUDA_VISIBLE_DEVICES" for name, _ in machine.environment)
    if machine.problem is not None or torch is None or not torch.found or torch.problem or hidden:
        return
    seen = len(machine.gpus)
    why = f" ({machine.gpu_problem})" if machine.gpu_problem else ""
    if machine.driver_gpus > seen and machine.cuda is None:
        yield Finding(
            "broken",
            said(
                "The driver lists {count}, and torch {found} was built without CUDA.",
                count=count(machine.driver_gpus, "GPU"),
                found=torch.found,
            ),
            "Install a build of torch with CUDA; pytorch.org/get-started gives the command.",
        )
    elif machine.driver_gpus > seen:
        yield Finding(
            "broken",
            said(
                "The driver lists {count}, and torch {found} sees {seen}{why}.",
                count=count(machine.driver_gpus, "GPU"),
                found=torch.found,
                seen=seen or said("none"),
                why=why,
            ),
            said(
                "Install a driver that is as new as torch's CUDA ({cuda}), and restart the machine.", cuda=machine.cuda
            ),
        )
    elif not seen and machine.gpu_problem:
        yield Finding(
            "broken",
            said("No GPU can be used: {gpu_problem}.", gpu_problem=machine.gpu_problem),
            "Repair or update the driver and restart the machine; start a container with --gpus all.",
        )


def _find_in_package(package: Package) -> Iterator[Finding]:
    level: Level = "broken"
    if package.name in OF_COMFYUI:
        fix = said("Install {name} as ComfyUI's instructions say.", name=package.name)
    elif package.name in EXTRAS:
        if package.found is None:
            return
        level = "warning"
        fix = said("Run ComfyUI's Python with: -m pip install {extra}", extra=f'"{PACK_ROOT}[diffusers]"')
    else:
        fix = said("Run ComfyUI's Python with: -m pip install -r {pack_root}", pack_root=PACK_ROOT / "requirements.txt")
    oldest = OLDEST[package.name]
    if package.found is None:
        yield Finding(level, said("The Python package {name} is missing.", name=package.name), fix)
    elif is_older(package.found, oldest):
        yield Finding(
            level,
            said(
                "{name} {found} is too old: {oldest} or newer is needed.",
                name=package.name,
                found=package.found,
                oldest=oldest,
            ),
            fix,
        )
    elif package.problem is not None:
        again = fix.replace("pip install", "pip install --force-reinstall --no-deps")
        what = said(
            "{name} {found} is installed and does not import ({problem}).",
            name=package.name,
            found=package.found,
            problem=package.problem,
        )
        yield Finding(level, what, again)


def find_in_link(link: LinkCheck) -> Iterator[Finding]:
    """The check of the collectives."""
    if link.failure is None:
        return
    kind, _, devices = link.devices.partition(":")
    on_gpus = kind == "cuda"
    several = "," in devices
    if "OutOfMemory" in link.failure:
        fix = "Free about 1 GiB on every GPU (Unload Models in ComfyUI, or close other programs), and try again."
    elif "could not start" in link.failure:
        fix = "Make room in the temporary folder ($TMPDIR or /tmp), and look at the limits on processes and open files."
    elif link.timed_out and re.search("starting Python|importing torch", link.failure):
        fix = "A slow disk or a busy machine takes its time to start Python: try again with --limit 300."
    elif on_gpus and several and "gloo" not in link.failure:
        fix = (
            "Try again with NCCL_P2P_DISABLE=1 in the environment: if that works, P2P between the GPUs is faulty, "
            "most often for IOMMU or ACS in the BIOS. NCCL_DEBUG=INFO makes NCCL say more."
        )
    elif on_gpus and "gloo" not in link.failure:
        fix = "Look into nvidia-smi for errors of the GPU; NCCL_DEBUG=INFO makes NCCL say more."
    else:
        fix = "The ranks talk over the loopback interface: look whether lo is up and 127.0.0.1 is not filtered."
    yield Finding("broken", said("{failure}.", failure=link.failure), fix)
