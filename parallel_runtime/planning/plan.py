"""From the artist's wish to the degrees of one request. Pure: every rank computes the same plan from the same facts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ..config import AXES, ParallelPlan
from ..requests.facts import SLOW_GB_PER_SECOND
from .coming_blocks import Coming
from .cost import Cost, PlannedStep
from .wish import Wish, check_limits

_WORTH_A_RANK = 0.98  # a plan of more ranks takes at most this share of the time, or the ranks stay out
_WORTH_A_RING = 0.95
_WORTH_OTHER_PIXELS = 0.9
"""PipeFusion changes the picture, so it must gain more than the rest, where it may be taken at all."""


@dataclass(frozen=True)
class Choice:
    """A plan with what it costs, and one rank alone; why `auto` took stages: "memory", "links"; "" where it did not."""

    plan: ParallelPlan
    cost: Cost
    alone: Cost
    reason: str = ""


def plan_loading(wish: Wish) -> ParallelPlan:
    """Return the plan whose stages decide which weights a rank loads; `pipe` is 1 where every rank loads all. A rank's
    stage follows from its coordinate, so every later plan keeps these stages and this split of the sequence. PipeFusion
    that `auto` takes for the links' sake splits no weights: the same model then also runs without stages, which is
    exact and which KSampler wants. Errors as of `choose`."""
    choice, config = choose(wish), wish.config
    plan = choice.plan if choice.reason != "links" else ParallelPlan()
    spare = wish.ranks // (plan.pipe * plan.sequence)
    if plan.pipe == 1 or spare <= plan.batch:
        return plan
    # The ranks that a single picture leaves idle hold stages, too: a batch will want them.
    if config.data is None:
        return replace(plan, data=spare // plan.cfg)
    return replace(plan, cfg=min(2, spare // plan.data)) if config.cfg is None else plan


@lru_cache(maxsize=256)  # a step of KSampler asks for the plan each time
def choose(wish: Wish) -> Choice:
    """Return the degrees for one request, which may need fewer ranks than there are, with what they cost and why.
    Degrees that are set stay as they are. The others are those with the shortest predicted step, and of plans that are
    nearly as fast the one with the fewest ranks: what no degree is set for is never slower than one rank. Errors as of
    `check_limits`."""
    config, model, machine, loaded = wish.config, wish.model, wish.machine, wish.loaded
    if config.keeps_pixels:
        # One patch: the stages work in turn, and every key and value is of the same step.
        config = replace(config, patches=1, warmup_steps=1)
    links_may = config.may_change_pixels and config.pipe is None
    if loaded is not None and loaded.pipe > 1:  # the ranks hold the weights of these stages
        config = replace(config, pipe=loaded.pipe)
    wish = replace(wish, config=config)
    check_limits(wish)
    alone = PlannedStep(ParallelPlan(), model, wish.request, machine, wish.compiled).cost()
    exact = _fastest(wish, (config.pipe or 1,))
    assert exact is not None  # what has no plan was refused
    if config.pipe is None and machine.on_gpu and model.has_stages:
        piped = _pipe_for_memory(wish, exact[1]) if loaded is None else None
        piped = piped or (_pipe_for_links(wish, exact[1]) if links_may else None)
        if piped is not None:
            return Choice(*piped, alone, "memory" if not machine.holds(exact[1].bytes) else "links")
    return Choice(*exact, alone)


def _pipe_for_memory(wish: Wish, exact: Cost) -> tuple[ParallelPlan, Cost] | None:
    """Stages, because a GPU cannot hold the whole model, and a share of it can."""
    if wish.machine.holds(exact.bytes):
        return None
    piped = _fastest(wish, _stage_counts(wish))
    return piped if piped is not None and wish.machine.holds(piped[1].bytes) else None


def _pipe_for_links(wish: Wish, exact: Cost) -> tuple[ParallelPlan, Cost] | None:
    """PipeFusion, because the links are slow and it sends the least; needs the whole loop in the pool."""
    machine = wish.machine
    if wish.config.ulysses is not None or not wish.request.in_pool:
        return None
    links = [machine.link, *([machine.network] if machine.network is not None else [])]
    if min(link.all_to_all for link in links) >= SLOW_GB_PER_SECOND:
        return None
    piped = _fastest(wish, _stage_counts(wish), split_weights=False)
    if piped is None or piped[1].seconds >= exact.seconds * _WORTH_OTHER_PIXELS:
        return None
    return piped if machine.holds(piped[1].bytes) else None


def _stage_counts(wish: Wish) -> Sequence[int]:
    """Numbers of stages above 1 that the model can be cut into."""
    return range(2, min(wish.ranks, wish.model.blocks) + 1)


def _fastest(wish: Wish, pipes: Sequence[int], split_weights: bool = True) -> tuple[ParallelPlan, Cost] | None:
    """The fastest plan that fits; where none fits, the fastest; None where the ranks do not do for any."""
    best, coming = None, Coming.of(wish.config, wish.ranks)
    for plan in sorted(_plans(wish, pipes), key=_simplicity):
        step = PlannedStep(plan, wish.model, wish.request, wish.machine, wish.compiled, split_weights, coming)
        cost = step.cost()
        if best is None or _is_better(wish, plan, cost, *best):
            best = plan, cost
    return best


def _is_better(wish: Wish, plan: ParallelPlan, cost: Cost, best: ParallelPlan, best_cost: Cost) -> bool:
    fits = wish.machine.holds(cost.bytes)
    if fits != wish.machine.holds(best_cost.bytes):
        return fits
    # Weights that stream make all plans as slow as their link. `auto` takes the plan of whole weights then: the picture
    # is the same only over as many ranks. Where one rank has all of them it need not wait for another's.
    seconds, best_seconds = cost.computing_seconds, best_cost.computing_seconds
    if wish.config.held:
        seconds, best_seconds = cost.seconds, best_cost.seconds
    if plan.ring > best.ring:
        return seconds < best_seconds * _WORTH_A_RING
    return seconds < best_seconds * (_WORTH_A_RANK if plan.world_size > best.world_size else 1 - 1e-9)


def _plans(wish: Wish, pipes: Sequence[int]) -> Iterator[ParallelPlan]:
    """All that a configuration leaves open. Of patches as many as there are stages or are set; on auto fewer, where
    each must have a token for every rank of a stage."""
    config, ranks, model, request = wish.config, wish.ranks, wish.model, wish.request
    most = {
        "data": request.batch,
        "cfg": min(2, request.batch),
        # With a degree for ulysses the artist has said how a picture is split.
        "ring": ranks if config.ulysses is None and model.splits_sequence else 1,
        "ulysses": model.heads,
    }
    limits: dict[str, Sequence[int]] = {axis: range(1, min(degree, ranks) + 1) for axis, degree in most.items()}
    limits |= {axis: (degree,) for axis in most if (degree := getattr(config, axis)) is not None}
    limits["pipe"] = pipes
    for shape in _products([limits[axis] for axis in AXES], ranks):
        plan = ParallelPlan(**dict(zip(AXES, shape, strict=True)))
        if wish.stage_ranks not in (0, plan.sequence) or plan.sequence > request.tokens:
            continue  # the weights are assigned otherwise, or a rank would be left without a token
        most_patches = request.most_patches(plan.sequence)
        patches = min(plan.pipe, most_patches) if config.patches is None else config.patches
        if plan.pipe == 1:
            yield plan
        elif 0 < patches <= most_patches:
            yield replace(plan, patches=patches, warmup_steps=config.warmup_steps)


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
