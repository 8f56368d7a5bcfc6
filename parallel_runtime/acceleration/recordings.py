"""Recordings of whole forwards, replayed as one launch: on several GPUs a step is so short that Python cannot launch
its kernels fast enough. One is made per kind of call: shapes, dtypes, other arguments and mesh."""

from __future__ import annotations

import logging
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import first_line
from ..mesh.agreement import NONE, all_agree, all_same
from ..mesh.launched import REPLAY, count
from ..mesh.mesh import Mesh
from .cuda_graphs import CudaGraphs, timed
from .host_tensors import HostTensors
from .recorded_kinds import Kind, OtherWay, Recordings

log = logging.getLogger(__name__)

WARM_RUNS = 2
"""Plain runs of a kind of call before it is recorded: the first compiles, and many a call never comes back."""
KEPT = 4
"""Kinds of a group: two CFG branches with texts of unlike lengths, and as many for a second size of picture."""
_FREE_FRACTION = 8
"""Recordings keep their memory. Where less than this part of the GPU is free, a new kind of call lets them go."""
_NEVER = -sys.maxsize
"""Runs of a kind of call that is not recorded."""
_READ_OTHERS = 3
"""A kind of call that has so often read other numbers than when it was recorded is not recorded any more."""
_UNLIKE = 0.05
"""A recording is not used whose result differs from the forward's by more than this part of its norm: what kernels of
another order of summation make of a deep network in bfloat16 is 0.02."""
_COMPARED = (torch.Tensor, bool, int, float, str, type(None))  # an argument of what is recorded


class RecordedForward:
    """Runs a forward, recording it where it repeats.

    The ranks of a sequence group call it alike, so they record and replay alike: they agree after each attempt, and one
    failure ends the recording for all. What is decided depends on nothing but calls over that group: recordings over
    others are kept apart, as their ranks know nothing of these. A rank may lose its own recordings at any time
    (`lose`): it runs plainly what the others replay, which makes the same collective calls, and they learn of it by the
    history (agreement.py). Weights may change in place; where a parameter gets other storage, call `clear`.

    Args:
        forward: must read nothing beside its arguments that changes from call to call.
        made_outside: what the forward just read and did not make, beside arguments and weights: a recording keeps it.
        probe: of a forward that may read values where the host sees them: makes other values of a call's tensors, for
            which a recording must give what the forward gives (host_tensors.py).
        other_way: of a forward that has one: each kind of call goes it from the first that may be recorded on.
    """

    def __init__(
        self, forward: Callable[..., Any], made_outside: Callable[[], Any] = lambda: None,
        probe: Callable[[list[torch.Tensor]], list[torch.Tensor]] | None = None, other_way: OtherWay | None = None,
    ):  # fmt: skip
        self._forward, self._made_outside, self._probe, self._other_way = forward, made_outside, probe, other_way
        self._graphs = CudaGraphs()
        self._over: defaultdict[tuple[int, ...], Recordings] = defaultdict(Recordings)  # by a group's ranks

    def clear(self) -> None:
        """Forget all, where the next call comes only after all ranks have agreed anew (`go_on`)."""
        self._over.clear()

    def lose(self) -> None:
        """Let all recordings and their memory go, on this rank alone."""
        for recordings in self._over.values():
            recordings.lose()

    def history(self, ranks: tuple[int, ...]) -> int:
        """The number of what is recorded over a sequence group of these ranks."""
        return self._over[ranks].history

    def go_on(self, ranks: tuple[int, ...], history: int) -> None:
        """Go on with what is recorded under this number, which all ranks of the group agreed on; else begin anew."""
        if self.history(ranks) != history:
            self._over[ranks] = Recordings(history)

    def has(self, ranks: tuple[int, ...], argument: str) -> bool:
        """Whether a call with this argument is recorded here, over a sequence group of these ranks."""
        return any(kind.replay is not None and (str, argument) in key for key, kind in self._over[ranks].kinds.items())

    def failed(self, mesh: Mesh) -> bool:
        """Whether a recording failed over the mesh's sequence group since the ranks agreed, on any of them."""
        return not self._over[mesh.sequence_ranks].enabled

    def leave(self, mesh: Mesh) -> None:
        """Let go of what was recorded over a mesh whose groups will be gone. Every rank of the mesh does it."""
        own = self._over[mesh.sequence_ranks]
        own.kinds = {key: kind for key, kind in own.kinds.items() if kind.mesh is not mesh}

    def _begin_anew(self, mesh: Mesh) -> None:
        """Let all recordings go at a point of the run that all ranks of the mesh's sequence group come to alike."""
        self.lose()
        self._over[mesh.sequence_ranks].kinds.clear()

    def __call__(self, mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any], compiled: bool = False) -> Any:
        """Run the forward on `mesh`. Collective over its sequence group; alike on all ranks is whether the forward runs
        this kind of call `compiled`: from then on it is a new kind, and its old recording goes."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        plain = partial(self._forward, *args, **kwargs)
        own = self._over[mesh.sequence_ranks]
        # Of tensors on several devices the host may read some, and a recording does not.
        apart = self._probe is not None and len({tensor.device for tensor in tensors}) > 1
        if apart or not own.enabled or not tensors or not all(isinstance(leaf, _COMPARED) for leaf in leaves):
            return plain()
        # What two calls have in common that can use one recording.
        parts = [(x.shape, x.dtype, x.device) if isinstance(x, torch.Tensor) else (type(x), x) for x in leaves]
        if compiled:
            own.kinds.pop((False, id(mesh), str(structure), *parts), None)
        kind = self._kind((compiled, id(mesh), str(structure), *parts), mesh, tensors[0].device)
        if self._other_way is None:
            return self._once(kind, plain, (args, kwargs), tensors)
        if kind.runs == WARM_RUNS and not kind.recorded:
            kind.other_way = all_same(kind.seen, mesh.sequence, kind.device)
        begins = kind.runs == 0
        with self._other_way.taken() if kind.other_way else nullcontext():
            output = self._once(kind, plain, (args, kwargs), tensors)
        if begins:  # it may have compiled, or tried to
            self._compare_states(own, kind)
        return output

    def _compare_states(self, own: Recordings, kind: Kind) -> None:
        """Have kinds that go the other way be seen anew, where a rank does otherwise since: it cannot go it alone."""
        assert self._other_way is not None
        state = self._other_way.state()
        same = all_same(state, kind.mesh.sequence, kind.device)
        if not same or state != own.state:
            for other in own.kinds.values():
                if other.other_way:
                    other.other_way = False
                    other.begin_anew(WARM_RUNS - 1)
        own.state = state if same else NONE

    def _once(self, kind: Kind, plain: Callable[[], Any], given: tuple[Any, ...], tensors: list[torch.Tensor]) -> Any:
        mesh = kind.mesh
        if kind.recorded and (kind.replay is not None or mesh.sequence is not None):
            # What this rank lost it may only record again when the others do; a rank that is alone may at once.
            if kind.replay is not None:
                count(REPLAY, mesh.sequence)
            output = plain() if kind.replay is None else kind.replay(tensors)
            if not kind.reads or kind.agree(kind.host is None or kind.host.held()):
                return output
            kind.failed += 1
            kind.begin_anew(0 if kind.failed < _READ_OTHERS else _NEVER)
            log.info("A forward is recorded anew, as it reads other numbers from the GPU than before.")
            return plain()
        if kind.runs == WARM_RUNS - 1:
            output, kind.was_long = timed(plain, kind.device)
            kind.seen = NONE if self._other_way is None else self._other_way.seen()
            kind.runs += 1  # behind it: a cancel of a decoder may end it
            return output
        if kind.runs >= WARM_RUNS:
            # Long on all: the GPU of a rank that launches late computes for no longer, and others wait for it there.
            if not kind.agree(kind.was_long()):
                return self._recorded(kind, given, tensors)
            kind.runs = _NEVER
        kind.runs += 1
        return plain()

    def _kind(self, key: tuple[Any, ...], mesh: Mesh, device: torch.device) -> Kind:
        own = self._over[mesh.sequence_ranks]
        kind = own.kinds.pop(key, None)
        if kind is None:
            has_memory = _has_memory()
            for recordings in () if has_memory else self._over.values():
                if recordings is not own:
                    recordings.lose()
            # Every rank of the group comes here at the same call, as their kinds are the same.
            if any(kind.recorded for kind in own.kinds.values()) and not all_agree(has_memory, mesh.sequence, device):
                self._begin_anew(mesh)
            kind = Kind(mesh, device)
        own.kinds[key] = kind
        if len(own.kinds) > KEPT:
            del own.kinds[next(iter(own.kinds))]
        if kind.recorded and kind.memory != _shared_memory(mesh):
            # It grew, on all ranks alike. A rank that lost its recording would meet the others in the new one, and they
            # it in the old. A plain run comes first: what lies in the memory is made there, and sent to the GPU, once.
            kind.begin_anew(WARM_RUNS - 1)
        return kind

    def _recorded(self, kind: Kind, given: tuple[Any, ...], tensors: list[torch.Tensor]) -> Any:
        def call(tensors: list[torch.Tensor]) -> Any:
            remaining = iter(tensors)
            args, kwargs = pytree.tree_map_only(torch.Tensor, lambda _: next(remaining), given)
            return self._forward(*args, **kwargs)

        replay, reason = None, ""
        static = [tensor.clone() for tensor in tensors]
        host = HostTensors(call, kind.device, watched=self._probe is not None)
        # This call's result, and the last warm-up: on the very tensors and the stream that are recorded.
        output = self._graphs.rehearse(host.keep, static)
        other = self._probe(static) if self._probe is not None else None
        expected = None if other is None else host.compare([tensor.clone() for tensor in other])
        try:
            replay = self._graphs.record(host.give, static, self._made_outside)
        except Exception as error:  # noqa: BLE001 - forwards run as well without one, whatever torch or CUDA raises
            reason = first_line(error)
        recorded = kind.agree(replay is not None)
        if replay is not None and recorded and other is not None:
            count(REPLAY, kind.mesh.sequence)
            alike = _alike(replay(other), expected) and host.held()
            reason = "" if alike else "its graph gives something else for other values"
            recorded = kind.agree(alike)
        if recorded:
            kind.replay, kind.host, kind.recorded, kind.memory = replay, host, True, _shared_memory(kind.mesh)
            kind.reads = other is not None and not kind.agree(host.differ is None)
        else:
            self._over[kind.mesh.sequence_ranks].enabled = False
            self._begin_anew(kind.mesh)
            log.warning("Forwards are launched kernel by kernel, as recording one failed: %s", reason or "another rank")
        return output


def _alike(found: Any, expected: Any) -> bool:
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
    tensors = ((one, other) for one, other in pairs if isinstance(one, torch.Tensor) and one.numel())
    numbers = ((one.nan_to_num().float(), other.nan_to_num().float()) for one, other in tensors)
    return not any(bool((one - other).norm() > _UNLIKE * other.norm()) for one, other in numbers)


def _shared_memory(mesh: Mesh) -> int:
    return 0 if mesh.peers is None else mesh.peers.made


def _has_memory() -> bool:
    free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (1, 1)
    return free * _FREE_FRACTION > total
