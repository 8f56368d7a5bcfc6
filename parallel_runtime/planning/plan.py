"""From the artist's wish to the degrees of one request. Pure: every rank computes the same plan from the same facts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ..config import AXES, ParallelConfig, ParallelPlan
from ..requests.facts import SLOW_GB_PER_SECOND, MachineFacts, ModelFacts, RequestFacts
from .coming_blocks import Coming
from .cost import Cost, predict
from .limits import check_limits, with_stages

_WORTH_A_RANK = 0.98
"""A plan of more ranks takes at most this share of the time, or the ranks stay out."""
_WORTH_A_RING = 0.95
_WORTH_OTHER_PIXELS = 0.9
"""PipeFusion changes the picture, so it must gain more than the rest, where it may be taken at all."""

_PIXELS = 16
"""Of a token's side, in most image models."""


def typical(width: int, height: int) -> RequestFacts:
    """One picture of that size."""
    return RequestFacts(width // _PIXELS * (height // _PIXELS), 512, rows=height // _PIXELS)


TYPICAL = typical(1024, 1024)
"""What a plan is made for when no request is there yet."""


@dataclass(frozen=True)
class Choice:
    """A plan with what it costs.

    Args:
        alone: cost of one rank.
        reason: why `auto` took stages: "memory", "links", or "" where it did not.
    """

    plan: ParallelPlan
    cost: Cost
    alone: Cost
    reason: str = ""


def resolve_plan(
    config: ParallelConfig,
    ranks: int,
    model: ModelFacts,
    request: RequestFacts,
    machine: MachineFacts,
    loaded: ParallelPlan | None = None,
) -> ParallelPlan:
    """Return the degrees for one request; they may need fewer ranks than there are.

    Degrees that are set stay as they are. The others are those with the shortest predicted step, and of plans that
    are nearly as fast the one with the fewest ranks: what no degree is set for is never slower than one rank.

    Args:
        ranks: of the pool, as far as the configuration may use them.
        machine: the same numbers on every rank, or the ranks make different plans and wait for ever.
        loaded: what `plan_loading` said; None before.

    Raises:
        ConfigurationError: see `check_limits`.
    """
    return choose(config, ranks, model, request, machine, loaded).plan


def plan_loading(config: ParallelConfig, ranks: int, model: ModelFacts, machine: MachineFacts) -> ParallelPlan:
    """Return the plan whose stages decide which weights a rank loads; `pipe` is 1 where every rank loads all.

    A rank's stage follows from its coordinate, so where weights are split every later plan keeps these stages and
    this split of the sequence. PipeFusion that `auto` takes for the links' sake splits no weights: the same model
    then also runs without stages, which is exact and which KSampler wants.

    Raises:
        ConfigurationError: see `check_limits`.
    """
    choice = choose(config, ranks, model, TYPICAL, machine)
    return _with_replicas(choice.plan, config, ranks) if choice.reason != "links" else ParallelPlan()


def _with_replicas(plan: ParallelPlan, config: ParallelConfig, ranks: int) -> ParallelPlan:
    """Let the ranks that a single picture leaves idle hold stages too: a batch will want them."""
    spare = ranks // (plan.pipe * plan.sequence)
    if plan.pipe == 1 or spare <= plan.batch:
        return plan
    if config.data is None:
        return replace(plan, data=spare // plan.cfg)
    return replace(plan, cfg=min(2, spare // plan.data)) if config.cfg is None else plan


@lru_cache(maxsize=256)  # a step of KSampler asks for the plan each time
def choose(
    config: ParallelConfig,
    ranks: int,
    model: ModelFacts,
    request: RequestFacts,
    machine: MachineFacts,
    loaded: ParallelPlan | None = None,
) -> Choice:
    """Return the plan of `resolve_plan`, with what it costs and why."""
    if config.keeps_pixels:
        # One patch: the stages work in turn, and every key and value is of the same step.
        config = replace(config, patches=1, warmup_steps=1)
    links_may = config.may_change_pixels and config.pipe is None
    config = with_stages(config, loaded)
    sequence = loaded.sequence if loaded is not None and loaded.pipe > 1 else 0
    check_limits(config, ranks, model, request, sequence)
    search = _Search(config, ranks, model, request, machine, sequence)
    alone = predict(ParallelPlan(), model, request, machine, config.compiles(machine.on_gpu))
    exact = search.fastest((config.pipe or 1,))
    assert exact is not None  # what has no plan was refused
    if config.pipe is None and machine.on_gpu and model.has_stages:
        piped = _pipe_for_memory(search, exact) if loaded is None else None
        piped = piped or (_pipe_for_links(search, exact) if links_may else None)
        if piped is not None:
            return Choice(*piped, alone, "memory" if not search.fits(exact[1]) else "links")
    return Choice(*exact, alone)


def _pipe_for_memory(search: _Search, exact: tuple[ParallelPlan, Cost]) -> tuple[ParallelPlan, Cost] | None:
    """Stages, because a GPU cannot hold the whole model, and a share of it can."""
    if search.fits(exact[1]):
        return None
    piped = search.fastest(search.stage_counts())
    return piped if piped is not None and search.fits(piped[1]) else None


def _pipe_for_links(search: _Search, exact: tuple[ParallelPlan, Cost]) -> tuple[ParallelPlan, Cost] | None:
    """PipeFusion, because the links are slow and it sends the least; needs the whole loop in the pool."""
    machine = search.machine
    if search.config.ulysses is not None or not search.request.in_pool:
        return None
    links = [machine.link, *([machine.network] if machine.network is not None else [])]
    if min(link.all_to_all for link in links) >= SLOW_GB_PER_SECOND:
        return None
    piped = search.fastest(search.stage_counts(), split_weights=False)
    if piped is None or piped[1].seconds >= exact[1].seconds * _WORTH_OTHER_PIXELS:
        return None
    return piped if search.fits(piped[1]) else None


@dataclass(frozen=True)
class _Search:
    """All plans that a configuration leaves open."""

    config: ParallelConfig
    ranks: int
    model: ModelFacts
    request: RequestFacts
    machine: MachineFacts
    sequence: int

    @property
    def _compiled(self) -> bool:
        return self.config.compiles(self.machine.on_gpu)

    def fits(self, cost: Cost) -> bool:
        """A rank's memory holds it, as far as that is known."""
        return not self.machine.usable_bytes or cost.bytes <= self.machine.usable_bytes

    def stage_counts(self) -> tuple[int, ...]:
        """Numbers of stages above 1 that the model can be cut into."""
        return tuple(range(2, min(self.ranks, self.model.blocks) + 1))

    def fastest(self, pipes: Sequence[int], split_weights: bool = True) -> tuple[ParallelPlan, Cost] | None:
        """The fastest plan that fits; where none fits, the fastest; None where the ranks do not do for any."""
        best: tuple[ParallelPlan, Cost] | None = None
        for plan in sorted(self._plans(pipes), key=_simplicity):
            facts = plan, self.model, self.request, self.machine, self._compiled
            cost = predict(*facts, split_weights, Coming.of(self.config, self.ranks))
            if best is None or self._better(plan, cost, *best):
                best = plan, cost
        return best

    def _better(self, plan: ParallelPlan, cost: Cost, best: ParallelPlan, best_cost: Cost) -> bool:
        if self.fits(cost) != self.fits(best_cost):
            return self.fits(cost)
        # Weights that stream make all plans as slow as their link. `auto` takes the plan of whole weights then: the
        # picture is the same only over as many ranks. Where one rank has all of them it need not wait for another's.
        seconds, best_seconds = cost.computing_seconds, best_cost.computing_seconds
        if self.config.held:
            seconds, best_seconds = cost.seconds, best_cost.seconds
        if plan.ring > best.ring:
            return seconds < best_seconds * _WORTH_A_RING
        return seconds < best_seconds * (_WORTH_A_RANK if plan.world_size > best.world_size else 1 - 1e-9)

    def _plans(self, pipes: Sequence[int]) -> Iterator[ParallelPlan]:
        config, request = self.config, self.request
        most = {
            "data": request.batch,
            "cfg": min(2, request.batch),
            # With a degree for ulysses the artist has said how a picture is split.
            "ring": self.ranks if config.ulysses is None and self.model.splits_sequence else 1,
            "ulysses": self.model.heads,
        }
        limits = [pipes if axis == "pipe" else _degrees(getattr(config, axis), most[axis], self.ranks) for axis in AXES]
        for shape in _products(limits, self.ranks):
            degrees = dict(zip(AXES, shape, strict=True))
            plan = ParallelPlan(**degrees)
            if self.sequence not in (0, plan.sequence) or plan.sequence > request.tokens:
                continue  # the weights are assigned otherwise, or a rank would be left without a token
            if plan.pipe == 1:
                yield plan
            elif patches := self._patches(plan):
                yield replace(plan, patches=patches, warmup_steps=self.config.warmup_steps)

    def _patches(self, plan: ParallelPlan) -> int:
        """As many as there are stages or are set; on auto fewer, where a patch must have a token for every rank of a
        stage. 0: these degrees leave some rank without one."""
        most = self.request.most_patches(plan.sequence)
        if self.config.patches is None:
            return min(plan.pipe, most)
        return self.config.patches if self.config.patches <= most else 0


def _degrees(given: int | None, most: int, ranks: int) -> Sequence[int]:
    return (given,) if given is not None else range(1, min(most, ranks) + 1)


def _products(choices: Sequence[Sequence[int]], ranks: int) -> Iterator[tuple[int, ...]]:
    """Every way to take one of each that needs no more than `ranks` ranks."""
    if not choices:
        yield ()
        return
    for degree in choices[0]:
        if degree <= ranks:
            for others in _products(choices[1:], ranks // degree):
                yield (degree, *others)


def _simplicity(plan: ParallelPlan) -> tuple[int, ...]:
    """Order in which plans are looked at; of equally fast ones the first is taken."""
    return plan.world_size, plan.ring, -plan.cfg, -plan.data, plan.pipe, plan.ulysses
