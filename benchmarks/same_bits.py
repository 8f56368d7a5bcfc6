"""Whether a compiled forward gives the same bits again; where not, whether that is a race or kernels of other rounding.

    torchrun --nproc-per-node 2 -m benchmarks.same_bits --comfyui ~/ComfyUI own-krea own-h3
    torchrun --nproc-per-node 2 -m benchmarks.same_bits --comfyui ~/ComfyUI --tiny own-krea  # on CPUs

Blocks are compiled in a fresh cache, so that torch.compile times its kernels and chooses among them anew: twice as
always, and twice by rule (`torch._inductor.config.deterministic`), where it times nothing that changes numbers. Each
row is several calls on one input. A row names the first block whose output differs, on the rank where it is the
earliest: what part of its numbers, how far in norm, and by how many steps of their type. Calls of one row that differ
are a race (or a kernel that sums in no order); what takes it away is to blame: blocks one at a time, heads by NCCL, no
recording. Rows that are each the same and differ from the first are other kernels, and those that were chosen
otherwise are listed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallel_runtime.mesh.mesh import Mesh
from parallel_runtime.networks.comfyui.host_network import HostNetwork

from .host_step_profile import Cut, finish, load, start
from .in_comfyui.host_families import HostFamily, loaded_as_tensors

_COMPILATIONS = ("as always", "as always, again", "by rule", "by rule, again")
_LISTED = 6
"""Kernels of other choice that a row names."""


@dataclass
class Trace:
    """What the blocks of one call gave on this rank, and the call's result."""

    blocks: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    output: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def outputs(self) -> list[tuple[str, torch.Tensor]]:
        """Blocks in their order, the result last."""
        return [*self.blocks, ("the result", self.output)]


@dataclass(frozen=True)
class Difference:
    """The first output of two calls that differs.

    Args:
        place: its number in the forward.
        name: of the block, or "the result".
        part: of its numbers.
        norm: of the difference over that of the output.
        steps: the largest difference of one number, in steps of its type.
    """

    place: int
    name: str
    part: float
    norm: float
    steps: int

    def __str__(self) -> str:
        told = f"{self.part:.1e} of its numbers, {self.norm:.1e} in norm, at most {self.steps} steps"
        return f"first in {self.place} ({self.name}): {told}"


def first_difference(one: Trace, other: Trace) -> Difference | None:
    """None where all blocks and the result are the same bits."""
    for place, ((name, a), (_, b)) in enumerate(zip(one.outputs(), other.outputs(), strict=True)):
        apart = _in_steps(a) - _in_steps(b)
        if bool(apart.any()):
            norm = float((a.float() - b.float()).norm() / a.float().norm())
            return Difference(place, name, float((apart != 0).float().mean()), norm, int(apart.abs().max()))
    return None


def _in_steps(x: torch.Tensor) -> torch.Tensor:
    """Numbers as integers in their order: neighbours of the type are one apart."""
    kind = {2: torch.int16, 4: torch.int32}[x.element_size()]
    bits = x.contiguous().view(kind).long()
    return torch.where(bits < 0, torch.iinfo(kind).min - bits, bits)


class Traced:
    """Stands before what runs a network's blocks, and keeps what they give.

    Args:
        alone: the device is idle on all ranks before and after each block.
    """

    def __init__(self, network: HostNetwork, device: torch.device):
        self._run = network._run_block
        self._device = device
        self.trace: Trace | None = None
        self.alone = False
        network._run_block = self

    def __call__(self, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], more: Any) -> Any:
        self._wait()
        made = forward(*args, **kwargs) if self._run is None else self._run(forward, args, kwargs, more)
        self._wait()
        if self.trace is not None:
            parts = made if isinstance(made, tuple | list) else (made,)
            name = type(getattr(forward, "__self__", None)).__name__
            self.trace.blocks += [(name, each.clone()) for each in parts if isinstance(each, torch.Tensor)]
        return made

    def _wait(self) -> None:
        if not self.alone:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()


def chosen_kernels() -> dict[str, tuple[str, str]]:
    """Triton kernels that torch.compile has chosen a configuration for: file -> (name, configuration)."""
    found = {}
    for each in gc.get_objects():
        if type(each).__name__ == "CachingAutotuner" and len(getattr(each, "launchers", ())) == 1:
            meta = each.inductor_meta or {}
            found[os.path.basename(each.filename or "")] = (meta.get("kernel_name", "?"), str(each.launchers[0].config))
    return found


@contextlib.contextmanager
def _compiling(by_rule: bool) -> Iterator[None]:
    """Inside nothing is known of earlier compilations."""
    import torch._inductor.config
    from torch._inductor.utils import fresh_inductor_cache

    torch._dynamo.reset()
    gc.collect()
    options = {"deterministic": True} if by_rule and hasattr(torch._inductor.config, "deterministic") else {}
    with torch._inductor.config.patch(options), fresh_inductor_cache():
        yield


class Row:
    """Calls of one kind.

    Args:
        calls: how many.
        reference: of the first row; None where this is it.
    """

    def __init__(self, name: str, calls: int, reference: Trace | None, lead: bool):
        self._name = name
        self._calls = calls
        self._reference = reference
        self._lead = lead

    def run(self, call: Callable[[], torch.Tensor], traced: Traced | None) -> Trace:
        """Call, and print how far the calls are apart. Collective.

        Args:
            traced: None where blocks are not to be looked at: they are in a recording.
        """
        traces = []
        for _ in range(self._calls):
            trace = Trace()
            if traced is not None:
                traced.trace = trace
            trace.output = call().clone()
            traces.append(trace)
        if traced is not None:
            traced.trace = None
        again = _earliest([first_difference(traces[0], each) for each in traces[1:]])
        told = f"calls differ, {again}" if again else "calls are the same bits"
        if self._reference is not None:
            base, own = self._reference, traces[0]
            if traced is None:
                base = Trace([], base.output)
            other = _earliest([first_difference(base, own)])
            told += f"; from the first row: {other or 'the same bits'}"
            if other:
                apart = float((base.output.float() - own.output.float()).norm() / base.output.float().norm())
                told += f", the result {apart:.1e}"
        if self._lead:
            print(f"   {self._name:34s} {told}", flush=True)
        return traces[0]


def _earliest(found: Sequence[Difference | None]) -> Difference | None:
    """Of all calls and ranks."""
    own = [each for each in found if each is not None]
    if dist.is_initialized():
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, own)
        own = [each for of_rank in gathered for each in of_rank]
    return min(own, key=lambda each: each.place, default=None)


def compare(family: HostFamily, mesh: Mesh, device: torch.device, options: argparse.Namespace) -> None:
    """Print the rows of one model."""
    lead = mesh.sequence_index == 0
    if lead:
        print(f"== {family.described} on {mesh.plan.sequence}", flush=True)
    cut = Cut(load(family, options.comfyui, device, 1), mesh, device, options.attention)
    references: dict[bool, Trace] = {}
    kernels: dict[bool, dict[str, tuple[str, str]]] = {}
    for which, name in enumerate(_COMPILATIONS[: options.compilations]):
        by_rule = which >= 2
        with _compiling(by_rule):
            network, call = cut.wrap(compiles=True)
            recorded, network._recorded = network._recorded, None
            call()
            traced = Traced(network, device)
            reference = Row(name, options.calls, references.get(by_rule), lead).run(call, traced)
            references.setdefault(by_rule, reference)
            _tell_choices(kernels, by_rule, lead)
            if which == 0:
                _other_ways(network, call, traced, recorded, reference, options.calls, lead)
            network.forget_runs()
            del network, call, traced
    if not lead or len(references) < 2:
        return
    apart = references[False].output.float() - references[True].output.float()
    print(
        f"   by rule is {float(apart.norm() / references[False].output.float().norm()):.1e} from as always", flush=True
    )


def _other_ways(
    network: HostNetwork,
    call: Callable[[], torch.Tensor],
    traced: Traced,
    recorded: Any,
    reference: Trace,
    calls: int,
    lead: bool,
) -> None:
    """The same compiled blocks, run otherwise."""
    traced.alone = True
    Row("  blocks one at a time", calls, reference, lead).run(call, traced)
    traced.alone = False
    peers, network._peers = network._peers, None
    Row("  heads by collectives", calls, reference, lead).run(call, traced)
    network._peers = peers
    if recorded is None:
        return
    network._recorded = recorded
    for _ in range(4):  # plain, plain, recorded and tried
        call()
    Row("  recorded", calls, reference, lead).run(call, None)
    network._recorded = None


def _tell_choices(kernels: dict[bool, dict[str, tuple[str, str]]], by_rule: bool, lead: bool) -> None:
    """Print how many kernels were chosen otherwise than in the compilation before of this kind, on this rank."""
    chosen = chosen_kernels()
    before = kernels.setdefault(by_rule, chosen)
    if before is chosen or not lead:
        return
    others = [
        (name, before[file][1], how) for file, (name, how) in chosen.items() if before.get(file, (0, how))[1] != how
    ]
    print(f"      {len(others)} of {len(chosen)} kernels of rank 0 were chosen otherwise", flush=True)
    for name, one, other in others[:_LISTED]:
        print(f"      {name}\n         {one}\n         {other}", flush=True)


@torch.no_grad()
def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=loaded_as_tensors())
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--format", choices=["", "fp8", "scaled fp8", "int8"])
    parser.add_argument("--calls", type=int, default=3)
    parser.add_argument("--compilations", type=int, default=len(_COMPILATIONS))
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--tiny", action="store_true", help="small networks, on CPUs where there are no GPUs")
    options = parser.parse_args()
    device, families, mesh = start(options)
    for name in options.models:
        family = families[name]
        assert isinstance(family, HostFamily)
        compare(family if options.format is None else replace(family, format=options.format), mesh, device, options)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    finish()


if __name__ == "__main__":
    main()
