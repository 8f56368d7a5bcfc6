"""Recordings of whole forwards: what a forward launches is recorded once and replayed as one launch.

On several GPUs a step is so short that Python cannot launch its kernels fast enough. A forward is recorded once per
kind of call: shapes, dtypes, other arguments and mesh. One that is long has its launches hidden, and is not recorded.
"""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..mesh.agreement import NONE, all_agree
from ..mesh.launched import REPLAY, count
from ..mesh.mesh import Mesh
from .cuda_graphs import CudaGraphs, Replay, timed
from .host_tensors import HostTensors

log = logging.getLogger(__name__)

WARM_RUNS = 2
"""Plain runs of a kind of call before it is recorded: the first compiles, and a call that never comes back is never
recorded."""
KEPT = 4
"""Recorded kinds, unless said otherwise: two CFG branches with texts of unlike lengths, and as many for a second size
of picture."""
_FREE_FRACTION = 8
"""Recordings keep their memory. Where less than this part of the GPU is free, a new kind of call lets them go."""

_READ_OTHERS = 3
"""A kind of call that has so often read other numbers than when it was recorded is not recorded any more."""
_UNLIKE = 0.05
"""A recording is not used whose result differs from the forward's by more than this part of its norm: what kernels of
another order of summation make of a deep network in bfloat16 is 0.02."""

Forward = Callable[..., Any]
Probe = Callable[[list[torch.Tensor]], list[torch.Tensor]]
"""Other values for a call's tensors, of the same shapes."""
Rehearse = Callable[[Callable[[list[torch.Tensor]], Any], list[torch.Tensor]], Any]
"""(call, its tensors) -> output, see `CudaGraphs.rehearse`."""
Record = Callable[["RecordedForward", Callable[[list[torch.Tensor]], Any], list[torch.Tensor]], Replay]
"""(owner, call, its tensors) -> replay; see `CudaGraphs.record`."""


@dataclass
class _Kind:
    """A kind of call: how often it was run, whether the ranks have recorded it, and this rank's recording if it still
    has it. `mesh` is held so that its id stays taken. `reads` says that a replay may be no result, on any rank, and
    `failed` how often one was none; `holds`, whether this rank's last one is. `memory` is which of the group's shared
    memories it was recorded with. `was_long` tells of the last warm run, see `timed`."""

    mesh: Mesh
    runs: int = 0
    recorded: bool = False
    replay: Replay | None = None
    reads: bool = False
    failed: int = 0
    holds: Callable[[], bool] = lambda: True
    memory: int = 0
    was_long: Callable[[], bool] = lambda: False


@dataclass
class _Recordings:
    """What the calls over one sequence group have left here. Its ranks have the same under the same number."""

    history: int = NONE
    enabled: bool = True
    kinds: OrderedDict[Hashable, _Kind] = field(default_factory=OrderedDict)

    def lose(self) -> None:
        """Let the recordings of this rank go, but not what the ranks know alike."""
        self.history = NONE
        for kind in self.kinds.values():
            kind.replay, kind.holds = None, lambda: True


class RecordedForward:
    """Runs a forward, recording it where it repeats.

    The ranks of a sequence group call it alike, so they record and replay alike: a rank that failed to record would
    part ways with the others, so they agree after each attempt, and one failure ends the recording for all. What is
    decided depends on nothing but calls over that group: recordings over others are kept apart, as their ranks know
    nothing of these. A rank may lose its own recordings at any time (`lose`): it runs plainly what the others replay,
    which makes the same collective calls, and they learn of it by the history (agreement.py).
    Weights may change in place; where a parameter gets other storage, call `clear`.

    Args:
        forward: gets the arguments, must read nothing else that changes from call to call.
        made_outside: tensors that the forward just read and did not make, beside arguments and weights; a recording
            keeps them alive.
        record: how to record; CUDA graphs (cuda_graphs.py) unless a test says otherwise.
        probe: of a forward that may read values where the host sees them, which a recording would repeat forever: one
            is believed only if it gives what the forward gives for these values. What such a forward sends from the
            host at each call, and reads from the GPU, is part of its recording (host_tensors.py).
    """

    def __init__(
        self,
        forward: Forward,
        made_outside: Callable[[], Any] = lambda: None,
        record: Record | None = None,
        probe: Probe | None = None,
    ):
        self._probe = probe
        self._forward = forward
        self.made_outside = made_outside
        graphs = CudaGraphs()
        self._rehearse: Rehearse = graphs.rehearse if record is None else lambda call, static: call(static)
        self._record = record or (lambda owner, call, static: graphs.record(call, static, owner.made_outside))
        self._over: dict[tuple[int, ...], _Recordings] = {}

    def clear(self) -> None:
        """Forget all, where the next call comes only after all ranks have agreed anew (`go_on`)."""
        self._over.clear()

    def lose(self) -> None:
        """Let all recordings and their memory go, on this rank alone."""
        for recordings in self._over.values():
            recordings.lose()

    def begin_anew(self, mesh: Mesh) -> None:
        """Let all recordings go at a point of the run that all ranks of the mesh's sequence group come to alike."""
        own = self._recordings(mesh)
        self.lose()
        self._over[mesh.sequence_ranks] = _Recordings(own.history, own.enabled)

    def history(self, ranks: tuple[int, ...]) -> int:
        """The number of what is recorded over a sequence group of these ranks."""
        return self._over[ranks].history if ranks in self._over else NONE

    def go_on(self, ranks: tuple[int, ...], history: int) -> bool:
        """Go on with what is recorded under this number, which all ranks of the group agreed on; else begin anew.

        Returns:
            Whether it is here.
        """
        if self.history(ranks) == history:
            return True
        self._over[ranks] = _Recordings(history)
        return False

    def leave(self, mesh: Mesh) -> None:
        """Let go of what was recorded over a mesh whose groups will be gone. Every rank of the mesh does it."""
        kinds = self._recordings(mesh).kinds
        for key in [key for key, kind in kinds.items() if kind.mesh is mesh]:
            del kinds[key]

    def _recordings(self, mesh: Mesh) -> _Recordings:
        return self._over.setdefault(mesh.sequence_ranks, _Recordings())

    def __call__(self, mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any], compiled: bool = False) -> Any:
        """Run the forward on `mesh`. Collective over its sequence group.

        Args:
            compiled: how the forward runs this kind of call; alike on all ranks. One that ran as it is, and runs
                compiled from now on, is a new kind, and its old recording goes. Other kinds keep theirs.
        """
        leaves, structure = pytree.tree_flatten((args, kwargs))
        recordings = self._recordings(mesh)
        key = _key(mesh, leaves, structure, compiled) if recordings.enabled else None
        if self._probe is not None and len({leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)}) > 1:
            key = None  # the host may read some of them, and a recording does not
        if key is None:
            return self._forward(*args, **kwargs)
        if compiled:
            recordings.kinds.pop(_key(mesh, leaves, structure, False), None)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        kind = self._kind(key, mesh, tensors[0].device)
        if kind.recorded and kind.memory != _shared_memory(mesh):
            # It grew, on all ranks alike. A rank that lost its recording would meet the others in the new one, and they
            # it in the old. A plain run comes first: what lies in the memory is made there, and sent to the GPU, once.
            kind.recorded, kind.replay, kind.holds = False, None, lambda: True
            kind.runs = WARM_RUNS - 1
        if kind.recorded and (kind.replay is not None or mesh.sequence is not None):
            # What this rank lost it may only record again when the others do; a rank that is alone may at once.
            if kind.replay is not None:
                count(REPLAY, mesh.sequence)
            output = kind.replay(tensors) if kind.replay is not None else self._forward(*args, **kwargs)
            if not kind.reads or all_agree(kind.holds(), mesh.sequence, tensors[0].device):
                return output
            self._read_others(kind)
            return self._forward(*args, **kwargs)
        kind.runs += 1
        if kind.runs < WARM_RUNS:
            return self._forward(*args, **kwargs)
        if kind.runs == WARM_RUNS:
            output, kind.was_long = timed(lambda: self._forward(*args, **kwargs), tensors[0].device)
            return output
        if not all_agree(not kind.was_long(), mesh.sequence, tensors[0].device):
            kind.runs = -sys.maxsize
            return self._forward(*args, **kwargs)

        def call(given: list[torch.Tensor]) -> Any:
            remaining = iter(given)
            filled = [next(remaining) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            given_args, given_kwargs = pytree.tree_unflatten(filled, structure)
            return self._forward(*given_args, **given_kwargs)

        return self._recorded(kind, call, tensors)

    def _read_others(self, kind: _Kind) -> None:
        """A replay was no result: the forward reads other numbers than when it was recorded. All ranks come here."""
        kind.replay, kind.recorded, kind.holds = None, False, lambda: True
        kind.failed += 1
        kind.runs = 0 if kind.failed < _READ_OTHERS else -sys.maxsize
        log.info("A forward is recorded anew, as it reads other numbers from the GPU than before.")

    def _kind(self, key: Hashable, mesh: Mesh, device: torch.device) -> _Kind:
        own = self._recordings(mesh)
        if key not in own.kinds:
            has_memory = _has_memory()
            if not has_memory:
                for recordings in self._over.values():
                    if recordings is not own:
                        recordings.lose()
            # Every rank of the group comes here at the same call, as their kinds are the same.
            if any(kind.recorded for kind in own.kinds.values()) and not all_agree(has_memory, mesh.sequence, device):
                self.begin_anew(mesh)
                own = self._recordings(mesh)
            own.kinds[key] = _Kind(mesh)
            while len(own.kinds) > KEPT:
                own.kinds.popitem(last=False)
        own.kinds.move_to_end(key)
        return own.kinds[key]

    def _recorded(self, kind: _Kind, call: Callable[[list[torch.Tensor]], Any], tensors: list[torch.Tensor]) -> Any:
        replay, output, reason = None, None, ""
        static = [tensor.clone() for tensor in tensors]
        host = HostTensors(call, tensors[0].device, watched=self._probe is not None)
        # This call's result, and the last warm-up: on the very tensors and the stream that are recorded.
        output = self._rehearse(host.keep, static)
        other = self._probe(static) if self._probe is not None else None
        expected = None if other is None else host.compare([tensor.clone() for tensor in other])
        try:
            replay = _with(host, self._record(self, host.give, static))
        except Exception as error:  # noqa: BLE001 - forwards run as well without one, whatever torch or CUDA raises
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        recorded = all_agree(replay is not None, kind.mesh.sequence, tensors[0].device)
        if recorded and other is not None:
            assert replay is not None
            count(REPLAY, kind.mesh.sequence)
            alike = _alike(replay(other), expected) and host.held()
            reason = "" if alike else "its graph gives something else for other values"
            recorded = all_agree(alike, kind.mesh.sequence, tensors[0].device)
        if recorded:
            kind.replay, kind.recorded, kind.holds = replay, True, host.held
            kind.memory = _shared_memory(kind.mesh)
            if other is not None:
                kind.reads = not all_agree(not host.reads, kind.mesh.sequence, tensors[0].device)
        else:
            self._recordings(kind.mesh).enabled = False
            self.begin_anew(kind.mesh)
            log.warning("Forwards are launched kernel by kernel, as recording one failed: %s", reason or "another rank")
        return output


def _with(held: Any, replay: Replay) -> Replay:
    """A replay that reads tensors of `held`."""
    return lambda tensors, held=held: replay(tensors)  # type: ignore[misc]


def _alike(found: Any, expected: Any) -> bool:
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
    for one, other in pairs:
        if isinstance(one, torch.Tensor) and one.numel():
            one, other = one.nan_to_num().float(), other.nan_to_num().float()
            if bool((one - other).norm() > _UNLIKE * other.norm()):
                return False
    return True


def _shared_memory(mesh: Mesh) -> int:
    return 0 if mesh.peers is None else mesh.peers.made


def _key(mesh: Mesh, leaves: list[Any], structure: Any, compiled: bool) -> Hashable | None:
    """What two calls have in common that can use one recording; None for arguments that cannot be compared."""
    if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return None
    parts: list[Hashable] = [id(mesh), compiled, str(structure)]
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            parts.append((tuple(leaf.shape), leaf.dtype, leaf.device))
        elif leaf is None or isinstance(leaf, bool | int | float | str):
            parts.append((type(leaf), leaf))
        else:
            return None
    return tuple(parts)


def _has_memory() -> bool:
    if not torch.cuda.is_available():
        return True
    free, total = torch.cuda.mem_get_info()
    return free * _FREE_FRACTION > total
