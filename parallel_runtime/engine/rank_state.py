"""What one rank's engine has from request to request: models, conditionings, meshes, facts of the machine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch

from ..config import ParallelPlan
from ..exchange.head_routes import HeadRoutes
from ..mesh.mesh import Layout
from ..mesh.speeds import devices_unlike, measure_speeds
from ..networks.network import Network
from ..patching.patch_data import PatchStore
from ..planning.explanation import details_of, what_runs
from ..planning.plan import choose
from ..requests.answers import Finished, PlanDetails
from ..requests.conditioning import ConditioningStore
from ..requests.control import Control
from ..requests.facts import CPU, MachineFacts, RequestFacts
from ..requests.requests import Load
from ..said import Said
from .opened import Opened, open_model
from .plan_meshes import Meshes
from .prepared import Prepared
from .residency import Residency
from .resident import Resident


@dataclass(frozen=True)
class Placed:
    """A request of a model, planned: what can be known of its run in PREPARE.

    Args:
        plan: the same on all ranks.
        place: this rank's in the plan; None where it takes no part.
        says: the plan in words; `details`: in numbers.
    """

    resident: Resident
    plan: ParallelPlan
    place: Layout | None
    says: Said
    details: PlanDetails

    def offers(self) -> dict[str, int]:
        """What this rank has recorded for such a request."""
        return self.resident.offers(self.place) if self.place is not None else {}


class RankState:
    """What prepared requests work with. Its constructor is collective over all ranks.

    Args:
        rank, world_size: place in the default process group; one rank needs none.
    """

    def __init__(self, device: torch.device, rank: int, world_size: int):
        self.device = device
        self.rank = rank
        self.world_size = world_size
        pool = os.environ.get("PARALLEL_DIT_POOL")  # its private folder on this host; a script has none
        self.residency = Residency(device, rank, folder=Path(pool) if pool else None)
        self.conditionings = ConditioningStore()
        self.patches = PatchStore()
        self.arriving: dict[int, dict[str, torch.Tensor]] = {}
        """Tensors of networks that are attached, until the last has come."""
        self.calls: dict[int, Prepared] = {}
        """Prepared calls by their number. The client decides what is kept, so that all ranks keep the same."""
        self.machine: MachineFacts = CPU
        """Ranks plan by it, so it is the same on all of them: from the Load request, or out of a collective."""
        self.unlike = devices_unlike(device, world_size)
        """Whether the ranks' devices are of several models."""
        speeds = measure_speeds(device, world_size)
        self.meshes = Meshes(rank, world_size, speeds, leave=self.residency.leave, share=HeadRoutes)
        self._opened: tuple[Load, Opened] | None = None

    def forget_requests(self) -> None:
        """Let go of what earlier requests have left for later ones: calls and conditionings."""
        self.calls.clear()
        self.conditionings.clear()
        self.arriving.clear()

    def detach(self, kept: Iterable[int]) -> None:
        """Forget networks beside the model but these, and the calls that are kept with them."""
        gone = self.conditionings.detach(kept)
        for kind in [kind for kind, call in self.calls.items() if call.names(gone)]:
            del self.calls[kind]

    def open(self, request: Load) -> Opened:
        """The file of a load that will come, which then need not be opened again."""
        opened = open_model(request, self.device)
        self._opened = msgspec.structs.replace(request, machine=None), opened
        return opened

    def take_opened(self, request: Load) -> Opened:
        """The file of a load, opened; see `open`."""
        known, self._opened = self._opened, None
        if known is not None and known[0] == msgspec.structs.replace(request, machine=None):
            return known[1]
        return open_model(request, self.device)

    def place(self, resident: Resident, request: RequestFacts) -> Placed:
        """Plan a request. The plan is the same on all ranks. Makes no collective call.

        Raises:
            ConfigurationError: the configuration cannot run it.
        """
        wish = replace(resident.wish, request=request, machine=self.machine)
        plan = choose(wish).plan
        place = self.meshes.place(plan)
        if place is not None and resident.network is not None:
            resident.network.check_ring(place)
        return Placed(resident, plan, place, what_runs(wish), details_of(wish))

    def join(self, placed: Placed, agreed: Mapping[str, int], control: Control) -> Network | None:
        """Join the groups of a plan, and have the model run over it; None on a rank that takes no part. Collective over
        the world where groups are new."""
        mesh = self.meshes.join(placed.plan)
        if mesh is None:
            return None
        placed.resident.meet()
        network = placed.resident.run_at(mesh)
        network.go_on(agreed, control.before_compiling)
        return network

    def finished(self, placed: Placed, repeated: bool = False) -> Finished:
        """The answer of a run. Where it is repeated, the client has heard the plan's details."""
        return Finished(placed.says, held=self.residency.held(), details=None if repeated else placed.details)
