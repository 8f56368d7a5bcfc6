"""Recordings of forwards that send tensors from the host, and read numbers; on a CPU, where it is a device, too."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from parallel_runtime.acceleration.compiled_methods import CompiledMethods
from parallel_runtime.acceleration.host_tensors import HostTensors
from parallel_runtime.acceleration.host_watch import unwatched, watching
from parallel_runtime.acceleration.recordings import WARM_RUNS, RecordedForward
from parallel_runtime.config import ParallelPlan
from parallel_runtime.mesh.mesh import build_mesh, single_rank_mesh
from parallel_runtime.switches import VARIABLE
from tests.pretended_gpu import PretendedGpu, to_gpu
from tests.ranks import run_ranks
from tests.recorders import recorded_by

ONE = single_rank_mesh()
CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MASK = torch.tensor([True, False, True, True])


def to_another(x: torch.Tensor) -> torch.Tensor:
    return x * torch.arange(4).to(x).div(2)


def to_a_device(x: torch.Tensor) -> torch.Tensor:
    return x + torch.linspace(0, 1, 4, dtype=torch.float64).to(x.device, torch.float32)


def from_numbers(x: torch.Tensor) -> torch.Tensor:
    return x * torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device) + x.new_tensor([4.0, 3.0, 2.0, 1.0])


def from_an_array(x: torch.Tensor) -> torch.Tensor:
    return x + torch.as_tensor(torch.arange(4).numpy(), device=x.device, dtype=torch.float32)


def written_into(x: torch.Tensor) -> torch.Tensor:
    table = torch.arange(4.0).to(x.device)
    table += x
    return table


def copied(x: torch.Tensor) -> torch.Tensor:
    table = torch.empty_like(x)
    table.copy_(torch.arange(4, dtype=torch.int64))
    return table * x


def indexed(x: torch.Tensor) -> torch.Tensor:
    both = x[None, torch.tensor([1])][0], x[torch.tensor(2)][None]
    chosen = torch.cat([x[torch.tensor([3, 1])], x[[0, 2]], x[MASK], *both])
    rows = torch.zeros(2, 4, device=x.device)
    rows[:, MASK] = x.new_ones(3).cumsum(0)  # of a tensor on the host PyTorch itself refuses it
    rows[0, torch.tensor([1])] = 2.0
    rows[1, MASK] = 3.0
    return chosen.sum() + rows * x


SENDING: list[Callable[[torch.Tensor], torch.Tensor]] = [
    to_another, to_a_device, from_numbers, from_an_array, written_into, copied, indexed,
]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("forward", SENDING)
def test_a_recording_holds_what_its_forward_sends_from_the_host(forward, device):
    recorded = RecordedForward(forward, probe=lambda tensors: [0.9 * each for each in tensors])
    recorded_by(again if device == "cpu" else None, recorded)
    for _ in range(WARM_RUNS + 4):
        x = torch.randn(4, device=device)
        assert torch.equal(recorded(ONE, (x,), {}), forward(x))
    (kind,) = recorded._over[ONE.sequence_ranks].kinds.values()
    assert kind.replay is not None


def again(call: Any, static: list[torch.Tensor], made_outside: Any) -> Any:
    """A stand-in for a CUDA graph, which calls the forward as it was called while it was recorded."""
    call(static)

    def replay(tensors: list[torch.Tensor]) -> Any:
        for old, new in zip(static, tensors, strict=True):
            old.copy_(new)
        return call(static)

    return replay


@pytest.mark.parametrize("forward", SENDING)
def test_while_it_is_recorded_nothing_leaves_the_host(forward):
    sends = HostTensors(forward_of(forward), CPU)
    x = torch.randn(4)
    expected = forward(x)
    assert torch.equal(sends.keep([x]), expected)
    assert sends._kept
    other = 0.5 * x
    assert torch.equal(sends.compare([other]), forward(other))
    before = [each.there.clone() for each in sends._kept]
    for each in sends._kept:
        each.there.zero_()
    assert not torch.equal(sends.give([x]), expected)  # it is what was kept that is read
    for each, was in zip(sends._kept, before, strict=True):
        each.there.copy_(was)
    for _ in range(2):
        assert torch.equal(sends.give([x]), expected)  # and nobody writes into it
    assert torch.equal(sends.give([other]), forward(other))


def forward_of(forward: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    return lambda given: forward(given[0])


COUNT = itertools.count()
UNLIKE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "values": lambda x: x + torch.tensor([float(x[0])] * 4).to(x.device),  # of the timestep, which the host read
    "another of the same values": lambda x: (
        x
        + torch.full((4,), 2.0 if x[0] > 0.7 else 2, dtype=torch.float32).to(
            x.device, torch.float64 if x[0] > 0.7 else torch.float32
        )
    ),
    "none": lambda x: x + torch.arange(4.0).to(x.device) if x[0] > 0.7 else x,
    "one more": lambda x: x if x[0] > 0.7 else x + torch.arange(4.0).to(x.device),
    "counted": lambda x: x + torch.full((4,), float(next(COUNT))).to(x.device),
    "random": lambda x: x + 1e-6 * torch.rand(4, device="cpu").to(x.device),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_a_forward_that_sends_other_values_for_another_timestep_is_not_recorded(name, caplog):
    recorded = recorded_by(again, RecordedForward(UNLIKE[name], probe=lambda tensors: [0.5 * each for each in tensors]))
    for _ in range(WARM_RUNS + 3):
        recorded(ONE, (torch.ones(4),), {})
    (message,) = caplog.messages
    assert message.startswith(
        "Forwards are launched kernel by kernel, as recording one failed: another call of its kind sends or reads "
    )
    assert ", in place 1 of " in message


Reading = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def written(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    table = torch.zeros(2, 4, device=x.device)
    table[0, mask > 0] = (x + 1)[mask > 0]
    table[1, x.new_zeros(1, dtype=torch.int64)] = 5.0
    return table * x


def filled(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Nothing of it is read: PyTorch fills where the mask says."""
    table = torch.zeros(2, 4, device=x.device)
    table[:, mask > 0] = 5.0
    table[0, 0] = mask.sum().item()
    return table * x


READING: dict[str, Reading] = {
    "number": lambda x, mask: x * mask.sum().item() + float(mask[0]) + int(mask[1]),
    "truth": lambda x, mask: x + 1 if mask.min() != mask[0] else 2 * x,
    "list": lambda x, mask: x * torch.tensor(mask.tolist()).to(x.device),
    "chosen": lambda x, mask: x[None, mask > 0] + 1,
    "written": written,
    "filled": filled,
    "some": lambda x, mask: x[: int(mask.sum())] * 3,
}
FIRST, SECOND = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0.0, 1.0, 0.0, 0.0])


@pytest.mark.parametrize("device", ["pretended", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", READING)
def test_a_replay_is_no_result_where_its_forward_would_read_other_numbers(name, device):
    forward = READING[name]
    gpu = PretendedGpu()
    recorded = RecordedForward(forward, probe=lambda tensors: [0.9 * tensors[0], tensors[1]])
    recorded_by(gpu.record if device == "pretended" else None, recorded)

    def run(mask: torch.Tensor, times: int) -> bool:
        for _ in range(times):
            x = torch.randn(4)
            there = to_gpu((x, mask)) if device == "pretended" else (x.to(device), mask.to(device))
            found = recorded(ONE, there, {})
            assert torch.equal(found.inside if device == "pretended" else found.cpu(), forward(x, mask))
        (kind,) = recorded._over[ONE.sequence_ranks].kinds.values()
        return kind.replay is not None

    with gpu if device == "pretended" else contextlib.nullcontext():
        assert run(FIRST, WARM_RUNS + 3)
        assert not run(SECOND, 1)
        assert run(SECOND, WARM_RUNS + 2)
        assert not run(FIRST, WARM_RUNS)
        assert run(FIRST, 2)
        assert not run(SECOND, 1)  # three times is often enough
        assert not run(SECOND, WARM_RUNS + 3)


def read_on_ranks(rank: int, world_size: int) -> dict[str, Any]:
    """Run by `run_ranks`: a forward with a collective, where one rank alone would read another number."""
    mesh = build_mesh(ParallelPlan(ulysses=world_size), rank, world_size)
    assert mesh is not None

    def forward(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        total = x * mask.sum().item()
        dist.all_reduce(total, group=mesh.sequence)
        return total

    recorded = recorded_by(again, RecordedForward(forward, probe=lambda tensors: [0.5 * tensors[0], tensors[1]]))
    outputs, kept = [], []
    for step in range(WARM_RUNS + 5):
        if step == WARM_RUNS + 2 and rank == 0:
            recorded.lose()  # and runs plainly what the other replays
        mask = torch.full((2,), 2.0 if rank == 1 and step > WARM_RUNS + 2 else 1.0)
        outputs.append(recorded(mesh, (torch.full((1,), float(step)), mask), {}).item())
        (kind,) = recorded._over[mesh.sequence_ranks].kinds.values()
        kept.append(kind.recorded)
    return {"outputs": outputs, "kept": kept}


@pytest.mark.slow
def test_where_one_rank_would_read_another_number_no_rank_takes_the_replay():
    for result in run_ranks(2, f"{__name__}:read_on_ranks"):
        changed = WARM_RUNS + 3
        assert result["outputs"] == [(4.0 if step < changed else 6.0) * step for step in range(WARM_RUNS + 5)]
        assert result["kept"] == [WARM_RUNS <= step < changed for step in range(WARM_RUNS + 5)]


def test_what_is_sent_otherwise_while_it_is_recorded_ends_the_recording():
    values = iter([1.0, 1.0, 2.0])
    sends = HostTensors(lambda given: given[0] + torch.full((1,), next(values)).to(CPU), CPU)
    sends.keep([torch.zeros(1)])
    sends.compare([torch.zeros(1)])
    with pytest.raises(RuntimeError, match="sends or reads other numbers in"):
        sends.give([torch.zeros(1)])


def test_switched_off_or_of_a_forward_that_we_know_nobody_looks_on(monkeypatch):
    def forward(given: list[torch.Tensor]) -> int:
        return len(torch.overrides._get_current_function_mode_stack())

    assert HostTensors(forward, CPU).keep([]) == 1
    assert HostTensors(forward, CPU, watched=False).keep([]) == 0
    monkeypatch.setenv(VARIABLE, "sent")
    assert HostTensors(forward, CPU).keep([]) == 0


def test_compiled_calls_are_not_watched():
    seen: list[Any] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Block(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin()

    methods = CompiledMethods(plain=True, backend="eager")
    x = torch.ones(2)
    with watching(Watch()), unwatched():
        with unwatched():
            x.cos()
        x.cos()
    assert seen == []
    with watching(Watch()):
        methods.call(Block().forward, (x,), {}, lambda *_: [], lambda: True)
        assert torch.Tensor.sin not in seen
        x.tan()
    assert torch.Tensor.tan in seen
    assert not methods.refused
