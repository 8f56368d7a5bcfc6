"""A pool in one process: an engine per rank, each running in a thread, over a communicator that only keeps books.

What every rank calls is matched with what the others of the group call: two that differ, a rank that is waited for by
others and will never come, or a call while a request is only prepared, is an error at once. Nothing waits for a clock.
"""

from __future__ import annotations

import gc
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.decomposition
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from parallel_runtime.acceleration import recordings as graphs
from parallel_runtime.acceleration.recordings import RecordedForward
from parallel_runtime.engine.engine import Engine
from parallel_runtime.engine.rank_state import Prepared
from parallel_runtime.exchange import grown_memory, head_routes
from parallel_runtime.exchange.grown_memory import HostMemory
from parallel_runtime.exchange.host_lanes import Slots
from parallel_runtime.networks import sequence_attention, shares
from parallel_runtime.networks.diffusers.parallel_transformer import ParallelTransformer
from parallel_runtime.requests.requests import Step
from parallel_runtime.streaming.share_memory import HostShare
from tests.recorders import recorded_by

CPU = torch.device("cpu")


class PartedWays(BaseException):
    """The ranks did not do the same. Nothing of ours catches it."""


@dataclass(frozen=True)
class Group:
    """A process group."""

    ranks: tuple[int, ...]
    group_name: str

    def size(self) -> int:
        return len(self.ranks)


class Communicator:
    """Matches the calls of the ranks, each in a thread of its own."""

    def __init__(self, world_size: int):
        self.world = Group(tuple(range(world_size)), "world")
        self.groups = {"world": self.world}
        self.here = threading.local()
        self._changed = threading.Condition()
        self._calls: dict[tuple[str, int], dict[int, tuple[str, Any]]] = defaultdict(dict)
        self._counts: dict[tuple[str, int], int] = defaultdict(int)
        self._mail: dict[tuple[str, int, int], list[torch.Tensor]] = defaultdict(list)
        self._waiting: dict[int, tuple[str, Callable[[], bool]]] = {}
        self._running: set[int] = set()
        self.made: dict[int, int] = defaultdict(int)
        self._failure = ""

    def run(self, rank: int, work: Callable[[], Any]) -> Any:
        """Call `work` as a rank."""
        self.here.rank = rank
        try:
            return work()
        finally:
            with self._changed:
                self._running.discard(rank)
                self._look_for_the_lost()
                self._changed.notify_all()

    def calls_of(self, rank: int) -> int:
        """How many collective calls a rank has made."""
        return sum(count for (_, caller), count in self._counts.items() if caller == rank)

    def begin(self) -> None:
        """All ranks begin to run."""
        self._running = set(self.world.ranks)

    @property
    def rank(self) -> int:
        """Whose thread this is."""
        rank = getattr(self.here, "rank", None)
        if rank is None:
            raise PartedWays("a collective call in PREPARE")
        return rank

    def note(self, group: Group, what: str, value: Any = None) -> dict[int, tuple[str, Any]]:
        """Tell what this rank does next in a group; it must be what the others do as their next."""
        rank = self.rank
        if group.group_name not in self.groups:
            self._fail(f"{what} in {group}, which was left")
        with self._changed:
            number = self._counts[group.group_name, rank]
            self._counts[group.group_name, rank] += 1
            calls = self._calls[group.group_name, number]
            calls[rank] = (what, value)
            if len({told for told, _ in calls.values()}) > 1:
                self._fail(f"in {group}: { {other: told for other, (told, _) in calls.items()} }")
            self._changed.notify_all()
        return calls

    def meet(self, group: Group, what: str, value: Any = None) -> list[Any]:
        """A collective: wait for all ranks of the group, and return what each brought."""
        calls = self.note(group, what, value)
        self._wait(f"{what} in {group}", lambda: len(calls) == group.size())
        return [calls[rank][1] for rank in group.ranks]

    def send(self, message: torch.Tensor, dst: int, group: Group) -> Any:
        """Send without waiting."""
        with self._changed:
            self._mail[group.group_name, self.rank, dst].append(message.clone())
            self._changed.notify_all()
        return SimpleNamespace(wait=lambda: None, is_completed=lambda: True)

    def receive(self, message: torch.Tensor, src: int, group: Group) -> Any:
        """Receive; `wait` waits."""
        box = self._mail[group.group_name, src, self.rank]

        def wait() -> None:
            self._wait(f"a message of rank {src}", lambda: bool(box))
            message.copy_(box.pop(0))

        return SimpleNamespace(wait=wait)

    def _wait(self, what: str, there: Callable[[], bool]) -> None:
        with self._changed:
            self._waiting[self.rank] = (what, there)
            self._look_for_the_lost()
            self._changed.wait_for(lambda: there() or self._failure)
            del self._waiting[self.rank]
            if self._failure:
                raise PartedWays(self._failure)

    def _look_for_the_lost(self) -> None:
        waiting = {rank: self._waiting[rank] for rank in self._running if rank in self._waiting}
        if waiting and len(waiting) == len(self._running) and not any(there() for _, there in waiting.values()):
            told = {rank: what for rank, (what, _) in waiting.items()}
            self._failure = self._failure or f"waiting for ever: {told}"
            self._changed.notify_all()

    def _fail(self, why: str) -> None:
        self._failure = self._failure or why
        self._changed.notify_all()
        raise PartedWays(self._failure)

    def new_group(self, ranks: Sequence[int]) -> Any:
        """Collective over the world."""
        name = f"group {self.made[self.rank]} of {self.world.size()}"
        self.made[self.rank] += 1
        self.meet(self.world, f"new group of {tuple(ranks)}")
        group = self.groups.setdefault(name, Group(tuple(ranks), name))
        return group if self.rank in ranks else object()

    def destroy(self, group: Group) -> None:
        """Every rank of the group does."""
        self.meet(group, "destroyed")

    def all_reduce(self, tensor: torch.Tensor, op: Any, group: Group) -> None:
        """The least of all."""
        tensor.copy_(torch.stack(self.meet(group, "all_reduce", tensor.clone())).amin(0))

    def broadcast(self, tensor: torch.Tensor, src: int, group: Group) -> None:
        """What one rank has."""
        brought = self.meet(group, f"broadcast of {tuple(tensor.shape)} by {src}", tensor.clone())
        tensor.copy_(brought[group.ranks.index(src)])

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, group: Group) -> None:
        """Into one tensor."""
        output.copy_(torch.cat(self.meet(group, "all_gather", tensor.clone())))

    def all_gather(self, tensor: torch.Tensor, size: int, name: str) -> torch.Tensor:
        """The functional one."""
        return torch.cat(self.meet(self.groups[name], "all_gather", tensor.clone()))

    def all_to_all(self, tensor: torch.Tensor, to: list[int], sent: list[int], name: str) -> torch.Tensor:
        """The functional one."""
        group = self.groups[name]
        brought = self.meet(group, "all_to_all", [part.clone() for part in tensor.split(sent)])
        return torch.cat([parts[group.ranks.index(self.rank)] for parts in brought])


class Hardware:
    """What happens to one rank and not to the others: by rank. `near`: GPUs write to each other's memory."""

    def __init__(self, near: bool) -> None:
        self.near = near
        self.no_room: set[int] = set()
        self.no_peer_memory: set[int] = set()
        self.cannot_record: set[int] = set()
        self.loses: set[int] = set()


class Control:
    """Nobody cancels; the votes are there."""

    def __init__(self, communicator: Communicator):
        self._communicator = communicator

    def progress(self, step: int, total: int, denoised: torch.Tensor | None = None) -> None:
        pass

    def before_compiling(self) -> None:
        pass

    def check_cancel(self) -> None:
        pass

    def loading(self, done: int, total: int) -> None:
        pass

    def vote_stop(self, members: Any) -> Callable[[], bool]:
        if members is not None:
            self._communicator.note(members, "vote")
        return lambda: False

    def all_stop(self, members: Any) -> bool:
        if members is not None:
            self._communicator.meet(members, "stop")
        return False


class ThreadedPool:
    """Ranks with their engines, and what the supervisor does."""

    def __init__(self, world_size: int, patch: pytest.MonkeyPatch, near: bool = True):
        self.communicator, self.hardware = Communicator(world_size), Hardware(near)
        stand_in(self.communicator, self.hardware, patch)
        self.engines = [Engine(CPU, rank, world_size) for rank in range(world_size)]
        self.control = Control(self.communicator)
        self.prepared: list[Prepared] = []
        """Of the last request that ran."""

    def submit(
        self, request: Any, tensors: Mapping[str, torch.Tensor], fails: tuple[int, bool] | None = None
    ) -> list[Any] | None:
        """Both phases of a job; None where it was abandoned.

        Args:
            fails: rank that fails in PREPARE, and whether it has done its work by then, and lets go of all it holds.
        """
        meta = {name: tensor.to("meta") for name, tensor in tensors.items()}
        prepared: list[Prepared] = []
        for rank, engine in enumerate(self.engines):
            if fails is not None and rank == fails[0]:
                if fails[1]:
                    engine.prepare(request, meta, self.control)
                    engine.free()
                continue
            prepared.append(engine.prepare(request, meta, self.control))
        if fails is not None:
            for each in prepared:
                each.undo()
            return None
        return self._run(prepared, tensors)

    def repeat(self, step: Step, tensors: Mapping[str, torch.Tensor]) -> list[Any]:
        """A call that was prepared before: there is nothing to agree on."""
        return self._run([engine.recall(step) for engine in self.engines], tensors)

    def _run(self, prepared: list[Prepared], tensors: Mapping[str, torch.Tensor]) -> list[Any]:
        names = {name for each in prepared for name in each.offers}
        agreed = {name: min(each.offers[name] for each in prepared if name in each.offers) for name in names}
        outcomes: dict[int, Any] = {}
        self.prepared = prepared

        def work(rank: int) -> None:
            own = {name: tensor.clone() for name, tensor in tensors.items()}
            try:
                with torch.no_grad():
                    outcomes[rank] = self.communicator.run(rank, lambda: prepared[rank].run(own, self.control, agreed))
            except BaseException as error:  # noqa: BLE001 - the end of a thread: told below
                outcomes[rank] = error

        self.communicator.begin()
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(prepared))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for outcome in sorted(outcomes.values(), key=lambda outcome: isinstance(outcome, PartedWays)):
            if isinstance(outcome, BaseException):
                raise outcome
        return [outcomes[rank] for rank in range(len(prepared))]


def stand_in(communicator: Communicator, hardware: Hardware, patch: pytest.MonkeyPatch) -> None:
    """Let the engine run over the communicator, and record and share memory as on GPUs."""
    patch.setattr(dist, "group", SimpleNamespace(WORLD=communicator.world))
    patch.setattr(dist, "new_group", communicator.new_group)
    patch.setattr(dist, "destroy_process_group", communicator.destroy)
    patch.setattr(dist, "all_reduce", communicator.all_reduce)
    patch.setattr(dist, "isend", communicator.send)
    patch.setattr(dist, "irecv", communicator.receive)
    patch.setattr(shares, "_all_gather", communicator.all_gather_single)
    functional = torch.ops._c10d_functional
    patch.setattr(functional, "all_gather_into_tensor", communicator.all_gather, raising=False)
    patch.setattr(functional, "all_to_all_single", communicator.all_to_all, raising=False)
    patch.setattr(functional, "wait_tensor", lambda tensor: tensor, raising=False)
    patch.setattr(torch, "compile", lambda function, **options: function)
    patch.setattr(gc, "collect", lambda *args: 0)  # it takes most of the time, and frees little here
    patch.setattr(graphs, "_has_memory", lambda: communicator.rank not in hardware.no_room)
    _share_memory(communicator, hardware, patch)
    _record(communicator, hardware, patch)


def _share_memory(communicator: Communicator, hardware: Hardware, patch: pytest.MonkeyPatch) -> None:
    def empty(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if communicator.rank in hardware.no_peer_memory:
            raise RuntimeError("out of memory")
        return torch.empty(size, dtype=dtype)  # never touched, so it takes no memory

    def rendezvous(memory: torch.Tensor, name: str) -> Any:
        group = communicator.groups[name]
        communicator.meet(group, f"rendezvous of {memory.numel()} bytes")
        return SimpleNamespace(buffer_ptrs=[0] * group.size())

    def attend(query: Any, key: Any, value: Any, *, kernel: Any, buffers: Any, scale: Any) -> torch.Tensor:
        group = communicator.groups[buffers.group]
        told = f"attention over {buffers.memory.numel()} bytes"
        keys, values = zip(*communicator.meet(group, told, (key, value)), strict=True)
        return kernel(query, torch.cat(keys, 1), torch.cat(values, 1), None, scale)

    patch.setattr(symmetric_memory, "empty", empty)
    patch.setattr(symmetric_memory, "rendezvous", rendezvous)
    patch.setattr(sequence_attention, "peer_attention", attend)
    patch.setattr(head_routes, "peers_are_near", lambda *_: hardware.near)
    _share_host_memory(communicator, hardware, patch)


def _share_host_memory(communicator: Communicator, hardware: Hardware, patch: pytest.MonkeyPatch) -> None:
    class SharedMemory(HostMemory):
        def _share(self, size: int, device: torch.device) -> Any:
            memory, refusal = super()._share(size, device)
            if memory is not None:
                memory.group = self._group  # type: ignore[attr-defined]
            return memory, refusal

    def opened(share: HostShare, rank: int, ranks: int, device: torch.device) -> Any:
        if communicator.rank in hardware.no_peer_memory:
            raise RuntimeError("memory of the host cannot be pinned")
        return SimpleNamespace(slots=Slots(ranks, share.memory.numel()))

    def attend(query: Any, key: Any, value: Any, *, kernel: Any, buffers: Any, scale: Any) -> torch.Tensor:
        told = f"attention over {buffers.memory.slots.size} bytes of the host in {buffers.chunks}"
        keys, values = zip(*communicator.meet(buffers.memory.group, told, (key, value)), strict=True)
        return kernel(query, torch.cat(keys, 1), torch.cat(values, 1), None, scale)

    patch.setattr(dist, "get_rank", lambda group: group.ranks.index(communicator.rank))
    patch.setattr(dist, "get_global_rank", lambda group, rank: group.ranks[rank])
    patch.setattr(dist, "broadcast", communicator.broadcast)
    patch.setattr(head_routes, "HostMemory", SharedMemory)
    patch.setattr(grown_memory, "StreamMemory", opened)
    patch.setattr(sequence_attention, "attend_through_host", attend)
    patch.setattr(head_routes, "may_go_through_host", lambda device: True)


def _record(communicator: Communicator, hardware: Hardware, patch: pytest.MonkeyPatch) -> None:
    def recorder(wrapped: Any) -> Any:
        def record(call: Any, static: list[torch.Tensor], made_outside: Any) -> Any:
            if wrapped.mesh.sequence is not None:
                communicator.note(wrapped.mesh.sequence, "record")
            if communicator.rank in hardware.cannot_record:
                raise RuntimeError("operation not permitted when stream is capturing")

            return call  # what a replay does, another rank may do plainly

        return record

    plain = ParallelTransformer.__init__

    def wrap(self: ParallelTransformer, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        self._recorded = recorded_by(recorder(self), RecordedForward(self.call_at_once, self._split.read))

    patch.setattr(ParallelTransformer, "__init__", wrap)
