"""What one rank's engine has from request to request (models, conditionings, meshes), and a request that is ready."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ..config import ParallelPlan
from ..errors import CheckpointError
from ..exchange.head_routes import HeadRoutes
from ..mesh.agreement import agreed_same
from ..mesh.mesh import Groups, Layout, Mesh, build_mesh, lay_out_plan, mesh_groups, single_rank_mesh
from ..mesh.speeds import compare_devices
from ..networks.network import Network
from ..patching.patch_data import PatchStore
from ..planning.explanation import details_of, what_runs
from ..planning.plan import choose
from ..requests.conditioning import ConditioningStore
from ..requests.control import Cancelled, Control
from ..requests.facts import CPU, MachineFacts, RequestFacts
from ..requests.requests import Answer, Finished, Load, PlanDetails
from ..said import Said
from .opened import Opened, open_model
from .residency import Residency, Resident

Tensors = Mapping[str, torch.Tensor]
Agreed = Mapping[str, int]
Results = dict[str, torch.Tensor]
Outcome = tuple[Answer, Results]


def require_same(name: str, agreed: Agreed, path: str) -> None:
    """Raise a CheckpointError, on all ranks, where they have unlike files (`offer_same`)."""
    if not agreed_same(name, agreed):
        what = "The hosts have different models at {path}."
        raise CheckpointError(what, "Copy the same file to all of them.", path=path)


@dataclass(kw_only=True)
class Prepared:
    """A request that this rank is ready to run. `run` is called on all ranks or on none."""

    run_it: Callable[[Tensors, Control, Agreed], Outcome]
    undo: Callable[[], None] = lambda: None  # what undoes preparing, where another rank could not prepare
    # What this rank has or can do where ranks may differ and must act alike; `agreed` is the least of all ranks' offers
    # under each name.
    offers: Mapping[str, int] = field(default_factory=dict)
    cancelled: bool = False  # the last run ended because the ranks agreed to stop
    takes_part: bool = True  # this rank has a part in the run, and is not outside of its plan
    # It needs its tensors on the host alone. It takes them on the device, too, where they come by that.
    on_host: bool = False
    names: Callable[[Set[int]], bool] = lambda networks: False  # whether it runs one of these networks beside the model

    def run(self, tensors: Tensors, control: Control, agreed: Agreed | None = None) -> Outcome:
        """Run; `tensors` are on this rank's device, `agreed` is None where this rank is the only one, and what it
        offers holds. Sets `cancelled` where the ranks agreed to stop."""
        try:
            return self.run_it(tensors, control, self.offers if agreed is None else agreed)
        except Cancelled:
            self.cancelled = True
            return Finished(), {}


KEPT = 16
"""Plans whose groups are kept, the last asked for, alike on all ranks. Another one costs a step its communicators."""


class Meshes:
    """Layouts and meshes by plan. `speeds` are those of all ranks, None where they are alike, the same on every rank;
    `leave` lets go of what was recorded over a mesh, before its groups are destroyed; `share`: see Groups."""

    def __init__(
        self, rank: int, world_size: int, speeds: Sequence[float] | None = None,
        leave: Callable[[Mesh], None] = lambda mesh: None,
        share: Callable[[dist.ProcessGroup], Any] | None = None,
    ):  # fmt: skip
        self.speeds, self.groups = speeds, Groups(rank, world_size, share)
        self._rank, self._world_size, self._leave = rank, world_size, leave
        self._joined: OrderedDict[ParallelPlan, Mesh | None] = OrderedDict()
        # One mesh for good: what the first rank recorded by itself is kept by it.
        self._alone = single_rank_mesh()

    def place(self, plan: ParallelPlan) -> Layout | None:
        """This rank's place in a plan, None where it takes no part. Pure."""
        return lay_out_plan(plan, self._rank, self._token_speeds(plan))

    def join(self, plan: ParallelPlan) -> Mesh | None:
        """This rank's mesh of a plan, with its links, None where this rank takes no part. Collective over the world
        where they are new: every rank joins the same plans in the same order, which only RUN can promise."""
        if plan.world_size == 1:
            return self._alone if self._rank == 0 else None
        # How often the latent is cut changes no group.
        key = replace(plan, patches=1, warmup_steps=0)
        if key not in self._joined:
            speeds = self._token_speeds(key)
            self._joined[key] = build_mesh(key, self._rank, self._world_size, speeds, self.groups)
        self._joined.move_to_end(key)
        if len(self._joined) > KEPT:
            _, oldest = self._joined.popitem(last=False)
            if oldest is not None:
                self._leave(oldest)
            self.groups.keep({group for plan in self._joined for group in mesh_groups(plan)})
        return self._joined[key]

    def _token_speeds(self, plan: ParallelPlan) -> Sequence[float] | None:
        # The ranks of a stage split their tokens patch by patch, in equal bands.
        return self.speeds if plan.pipe == 1 else None


@dataclass(frozen=True)
class Placed:
    """A request of a model, planned: what can be known of its run in PREPARE."""

    resident: Resident
    plan: ParallelPlan  # the same on all ranks
    place: Layout | None  # this rank's in the plan; None where it takes no part
    says: Said  # the plan in words
    details: PlanDetails  # and in numbers

    def offers(self) -> dict[str, int]:
        """What this rank has recorded for such a request."""
        return self.resident.offers(self.place) if self.place is not None else {}


class RankState:
    """What prepared requests work with. Its constructor is collective over all ranks; `rank` and `world_size` are the
    place in the default process group, and one rank needs none."""

    def __init__(self, device: torch.device, rank: int, world_size: int):
        self.device, self.rank, self.world_size = device, rank, world_size
        pool = os.environ.get("PARALLEL_DIT_POOL")  # its private folder on this host; a script has none
        self.residency = Residency(device, rank, folder=Path(pool) if pool else None)
        self.conditionings = ConditioningStore()
        self.patches = PatchStore()
        self.arriving: dict[int, dict[str, torch.Tensor]] = {}  # of networks that are attached, until all have come
        self.calls: dict[int, Prepared] = {}
        """Prepared calls by their number. The client decides what is kept, so that all ranks keep the same."""
        self.machine: MachineFacts = CPU
        """Ranks plan by it, so it is the same on all of them: from the Load request, or out of a collective."""
        self.unlike, speeds = compare_devices(device, world_size)
        """Whether the ranks' devices are of several models."""
        self.meshes = Meshes(rank, world_size, speeds, leave=self.residency.leave, share=HeadRoutes)
        self._opened: tuple[Load, Opened] | None = None

    def forget_requests(self) -> None:
        """Let go of what earlier requests have left for later ones: calls and conditionings."""
        self.calls.clear()
        self.conditionings.clear()
        self.arriving.clear()

    def open(self, request: Load, ahead: bool = False) -> Opened:
        """The file of a load; one that is opened `ahead` need not be opened again by the load itself."""
        request = msgspec.structs.replace(request, machine=None)
        known, self._opened = self._opened, None
        if known is not None and known[0] == request and not ahead:
            return known[1]
        opened = open_model(request, self.device)
        self._opened = (request, opened) if ahead else None
        return opened

    def place(self, resident: Resident, request: RequestFacts) -> Placed:
        """Plan a request, on all ranks alike and without a collective; ConfigurationError where no plan can run it."""
        wish = replace(resident.wish, request=request, machine=self.machine)
        plan = choose(wish).plan
        place = self.meshes.place(plan)
        if place is not None and resident.network is not None:
            resident.network.check_ring(place)
        return Placed(resident, plan, place, what_runs(wish), details_of(wish))

    def join(self, placed: Placed, agreed: Mapping[str, int], control: Control) -> Network | None:
        """Have the model run over a plan; None on a rank outside. Collective over the world where groups are new."""
        mesh = self.meshes.join(placed.plan)
        if mesh is None:
            return None
        placed.resident.meet()
        network = placed.resident.run_at(mesh)
        network.go_on(agreed, control.before_compiling, self.machine)
        return network

    def finished(self, placed: Placed, repeated: bool = False) -> Finished:
        """The answer of a run. Where it is repeated, the client has heard the plan's details."""
        return Finished(placed.says, held=self.residency.held(), details=None if repeated else placed.details)
